#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/tiny_project.h"
#include "recipes/recipe.h"

namespace mergex {
namespace {
namespace fs = std::filesystem;

using Catch::Contains;
using io::Json;

/// results.json of a run that has one split, and that split.
Json first_split(const fs::path& run) { return test::read_json(run / "results.json")["splits"][0]; }

std::vector<Json> lines_of(const fs::path& file) {
  std::vector<Json> lines;
  const auto text = test::read_text(file);
  for (std::size_t at = 0; at < text.size();) {
    const auto end = text.find('\n', at);
    lines.push_back(io::parse_json(text.substr(at, end - at), file.string()));
    at = end + 1;
  }
  return lines;
}

/// A recipe that scores a checkpoint as it is.
Json zero_steps(Json recipe, const fs::path& checkpoint) {
  recipe["model"] = {{"checkpoint", checkpoint.string()}};
  recipe["training"]["max_steps"] = 0;
  return recipe;
}

TEST_CASE("a sweep ends in one table, one row per method and a deviation over seeds", "[cli]") {
  const test::TinyProject project;
  auto recipe = project.recipe();
  recipe["sweep"] = {{"/experts",
                      {{"dense", nullptr},
                       {"mixture", {{"method", "smoe"}, {"num_experts", 2}, {"router", {{"top_k", 1}}}}},
                       {"ties", {{"method", "camex"}, {"num_experts", 2}, {"protocol", "ties"}}}}},
                     {"/seed", {1, 2, 3}}};
  const auto run = project.finetune(recipe, "out");
  const auto markdown = test::read_text(project / "out/table.md");
  const auto csv = test::read_text(project / "out/table.csv");
  const auto plot = test::read_text(project / "out/scores.svg");
  for (const char* row : {"dense", "mixture", "ties"}) {
    CHECK_THAT(run.out, Contains(row));
    CHECK_THAT(markdown, Contains(fmt::format("| {} ", row)));
    CHECK_THAT(csv, Contains(fmt::format("\n{},", row)));
    CHECK_THAT(plot, Contains(row));
    for (int seed = 1; seed <= 3; ++seed) {
      const auto folder = project / "out" / fmt::format("{}.seed-{}", row, seed);
      CHECK(test::read_json(folder / "results.json")["seed"] == seed);
    }
  }
  CHECK_THAT(markdown, Contains(" ± ") && Contains("accuracy ×100") && Contains("router entropy") &&
                           Contains("sample standard deviation over seeds"));
  CHECK(test::num_lines(csv) == 4);
  CHECK_THAT(plot, Catch::StartsWith("<svg") || Contains("<svg"));
  CHECK_THAT(run.out, Contains((project / "out/table.md").string()) && Contains((project / "out/scores.svg").string()));
  CHECK(test::read_json(project / "out/results.json")["rows"].size() == 9);
}

TEST_CASE("soft merging and the release profile end in a table, and read their checkpoints back", "[cli]") {
  const test::TinyProject project;
  auto recipe = project.recipe();
  const Json release{{"method", "camex"},       {"profile", "release"},  {"num_experts", 3},
                     {"protocol", "dare"},      {"dare_p", 0.3},         {"curvature", {{"rank", 2}}},
                     {"router_scope", "per_ffn"}, {"share_curvature_across_layers", true}};
  const Json meo{{"method", "soft_merge"}, {"num_experts", 3}, {"router", {{"kind", "noisy_top_k"}, {"level", "token"}}}};
  recipe["sweep"] = {{"/experts",
                      {{"smear", {{"method", "soft_merge"}, {"num_experts", 3}, {"router", {{"expert_dropout", 0.2}}}}},
                       {"meo", meo},
                       {"release", release}}}};
  const auto run = project.finetune(recipe, "out");
  for (const char* row : {"smear", "meo", "release"}) CHECK_THAT(run.out, Contains(row));

  recipe.erase("sweep");
  for (const auto& [row, experts] : {std::pair{"meo", meo}, std::pair{"release", release}}) {
    auto again = zero_steps(recipe, project / "out" / row / "checkpoints/best");
    again["experts"] = experts;
    // Padding counts in the release, so that the batch must not.
    again["evaluation"]["batch_size"] = 3;
    const auto read = project.finetune(again, std::string(row) + "-again");
    CHECK_THAT(read.err, Contains("experts from the checkpoint") && !Contains("other options"));
    const auto before = first_split(project / "out" / row), after = first_split(project / (std::string(row) + "-again"));
    CHECK(after["accuracy"] == before["accuracy"]);
    CHECK(after["loss"].get<double>() == Approx(before["loss"].get<double>()).epsilon(1e-5));
  }
  auto other = zero_steps(recipe, project / "out/release/checkpoints/best");
  other["experts"] = release;
  other["experts"]["mask_order"] = "before_curvature";
  CHECK_THAT(project.finetune(other, "other").err, Contains("trained with other options"));
}

TEST_CASE("a failed row is reported, the rest go on, and finished rows stay as they are", "[cli]") {
  const test::TinyProject project;
  auto recipe = project.recipe();
  recipe["sweep"] = {{"/model/config/initializer_factor", {{"wild", 1e30}, {"tame", 1.0}}}};
  const auto run = project.finetune(recipe, "out", {}, 3);
  CHECK_THAT(run.err, Contains("row failed: wild") && Contains("step 0: the loss or gradient is not finite") &&
                          Contains("first tensor that is not: encoder.") && Contains("1 of 2 rows failed"));
  CHECK_THAT(run.out, Contains("tame") && Contains("failed: wild"));
  CHECK_THAT(test::read_text(project / "out/table.md"), Contains("| tame") && Contains("failed: wild"));
  CHECK_FALSE(fs::exists(project / "out/wild/results.json"));

  const auto finished = fs::last_write_time(project / "out/tame/results.json");
  const auto times = test::read_text(project / "out/tame/timing.jsonl");
  const auto before = test::contents(project / "out");
  const auto again = project.finetune(recipe, "out", {"--resume"}, 3);
  CHECK_THAT(again.err, Contains("row 1/2") && !Contains("row 2/2"));
  CHECK(fs::last_write_time(project / "out/tame/results.json") == finished);
  CHECK(test::read_text(project / "out/tame/timing.jsonl") == times);
  CHECK(test::differences(before, test::contents(project / "out")).empty());

  // Alone, it stops with the guard's exit code and without a result.
  recipe.erase("sweep");
  recipe["model"]["config"]["initializer_factor"] = 1e30;
  const auto alone = project.finetune(recipe, "alone", {}, 3);
  CHECK_THAT(alone.err, Contains("mergex: stopped: step 0: the loss or gradient is not finite"));
  CHECK(alone.out.empty());
}

TEST_CASE("classes of a checkpoint's head are matched by name (E7)", "[cli][law]") {
  const test::TinyProject project;
  // Many more of one kind, so that F1 of the two classes differs.
  test::write_text(project / "validation.tsv",
                   test::tiny_sentences(20, 2) + "king altar priest\told\nking sons house\told\nland king\told\n");
  auto recipe = project.recipe();
  recipe["training"]["max_steps"] = 12;
  recipe["evaluation"]["every"] = 12;
  project.finetune(recipe, "trained");
  const auto checkpoint = project / "trained/checkpoints/best";
  const auto trained = first_split(project / "trained");
  REQUIRE(trained["accuracy"] > 0.6);

  const auto same = zero_steps(recipe, checkpoint);
  project.finetune(same, "same");
  CHECK(first_split(project / "same") == trained);

  auto reversed = same;
  reversed["task"]["labels"] = {"new", "old"};
  const auto mapped = project.finetune(reversed, "reversed");
  CHECK_THAT(mapped.err, Contains("another order"));
  const auto scores = first_split(project / "reversed");
  CHECK(scores["accuracy"] == trained["accuracy"]);
  CHECK(scores["loss"].get<double>() == Approx(trained["loss"].get<double>()).epsilon(1e-6));
  CHECK(scores["matthews"].get<double>() == Approx(trained["matthews"].get<double>()));
  // Class 1 is the task's, whatever the checkpoint's is.
  const auto f1_of_old = [&] {
    double both = 0, either = 0;
    for (const auto& line : lines_of(project / "trained/predictions.jsonl")) {
      const bool gold = line["gold"] == "old", predicted = line["prediction"] == "old";
      both += gold && predicted ? 1 : 0;
      either += (gold ? 1 : 0) + (predicted ? 1 : 0);
    }
    return 2 * both / either;
  }();
  CHECK(scores["f1"].get<double>() == Approx(f1_of_old));
  CHECK(scores["f1"] != trained["f1"]);
  // The checkpoint that it writes has the task's order and reads back as it is.
  auto written = zero_steps(reversed, project / "reversed/checkpoints/best");
  const auto back = project.finetune(written, "back");
  CHECK_THAT(back.err, !Contains("another order"));
  CHECK(first_split(project / "back") == scores);

  auto strangers = same;
  strangers["task"]["labels"] = {"old", "new", "apocrypha"};
  const auto refused = project.finetune(strangers, "strangers", {}, 2);
  CHECK(test::num_lines(refused.err) == 1);
  CHECK_THAT(refused.err, Contains("\"old\" or \"new\"") && Contains("apocrypha") && Contains("/model/new_head"));
  CHECK_FALSE(fs::exists(project / "strangers"));
  const auto anew = project.finetune(strangers, "anew", {"--set", "/model/new_head=true"});
  CHECK_THAT(anew.err, Contains("new head, drawn from the seed"));
}

TEST_CASE("a constant predictor is reported as collapsed (E8)", "[cli][law]") {
  const test::TinyProject project;
  test::write_text(project / "train.tsv", "text\tlabel\nking altar\told\nsons house\told\nland priest\told\n");
  auto recipe = project.recipe();
  recipe["training"]["max_steps"] = 20;
  recipe["training"]["optimizer"]["learning_rate"] = 0.02;
  recipe["evaluation"]["every"] = 20;
  recipe["evaluation"]["select_best_by"] = "matthews";
  const auto run = project.finetune(recipe, "out");
  const auto split = first_split(project / "out");
  CHECK_THAT(split["collapsed"].get<std::string>(), Contains("all 20 predictions are \"old\""));
  CHECK(split["matthews"].is_null());
  CHECK_THAT(test::read_text(project / "out/table.md"), Contains("collapsed: all 20 predictions are \"old\""));
  CHECK_THAT(run.out, Contains("collapsed: all 20 predictions are \"old\""));
}

TEST_CASE("the results are those of the best checkpoint, as it lies on the disk (E14)", "[cli][law]") {
  const test::TinyProject project;
  const bool is_random = GENERATE(false, true);
  auto recipe = is_random ? project.random_recipe(12) : project.recipe();
  recipe["training"]["max_steps"] = 12;
  recipe["training"]["optimizer"]["learning_rate"] = 0.02;
  recipe["evaluation"] = {{"every", 3}, {"batch_size", 8}, {"select_best_by", "loss"}};
  project.finetune(recipe, "trained");
  const auto trained = test::read_json(project / "trained/results.json");
  const auto checkpoint = project / "trained/checkpoints/best";
  CHECK(fs::read_symlink(checkpoint) == fmt::format("step-{}", trained["best_step"].get<int>()));
  const auto again = zero_steps(recipe, checkpoint);
  project.finetune(again, "again");
  CHECK(test::read_json(project / "again/results.json")["splits"] == trained["splits"]);
  CHECK(test::read_text(project / "again/predictions.jsonl") == test::read_text(project / "trained/predictions.jsonl"));
  // The best of those that metrics.jsonl has seen.
  double best = 1e300;
  for (const auto& line : lines_of(project / "trained/metrics.jsonl")) {
    if (line.contains("evaluation")) best = std::min(best, line["evaluation"]["validation"]["loss"].get<double>());
  }
  CHECK(trained["splits"][0]["loss"] == best);
}

TEST_CASE("rows without a label are predicted and never scored (E16)", "[cli][law]") {
  const test::TinyProject project;
  const auto labelled = test::tiny_sentences(20, 2);
  auto recipe = project.recipe();
  project.finetune(recipe, "plain");
  test::write_text(project / "validation.tsv",
                   labelled + "king and grace\t-1\nfaith of the house\t-1\nland\t-1\nspirit\t-1\nlove\t-1\n");
  project.finetune(recipe, "more");
  const auto plain = first_split(project / "plain"), more = first_split(project / "more");
  CHECK(more["n"] == 20);
  CHECK(more["accuracy"] == plain["accuracy"]);
  CHECK(more["loss"].get<double>() == Approx(plain["loss"].get<double>()).epsilon(1e-6));
  const auto predictions = lines_of(project / "more/predictions.jsonl");
  REQUIRE(predictions.size() == 25);
  for (std::size_t i = 0; i < predictions.size(); ++i) CHECK(predictions[i]["gold"].is_null() == (i >= 20));

  test::write_text(project / "validation.tsv", "text\tlabel\nking\t-1\nfaith\t-1\n");
  const auto none = project.finetune(recipe, "none", {}, 2);
  CHECK_THAT(none.err, Contains("none of its 2 examples has a label"));
  CHECK_FALSE(fs::exists(project / "none"));
}

TEST_CASE("the resolved recipe runs again, and gives the same", "[cli][law]") {
  const test::TinyProject project;
  project.finetune(project.random_recipe(4), "out");
  const auto resolved = test::read_json(project / "out/recipe.resolved.json");
  const test::TinyProject elsewhere;
  elsewhere.finetune(resolved, "out");
  CHECK(test::differences(test::contents(project / "out"), test::contents(elsewhere / "out")).empty());
}

TEST_CASE("every recipe that is shipped passes a dry run", "[cli]") {
  const test::TinyProject project;
  // Stands in for checkpoints that have to be trained or downloaded first.
  const auto stand_in = [&](const std::string& name, const fs::path& tokenizer, int vocab_size) {
    auto recipe = project.recipe();
    recipe["model"]["tokenizer"] = tokenizer.string();
    recipe["model"]["config"]["vocab_size"] = vocab_size;
    recipe["training"]["max_steps"] = 0;
    project.finetune(recipe, name);
    return (project / name / "checkpoints/best").string();
  };
  const auto small = stand_in("small", test::tiny_tokenizer(), 2112);
  std::string large;
  if (const auto tokenizer = test::data_path("tokenizers/t5")) large = stand_in("large", *tokenizer, 32128);

  std::size_t checked = 0;
  const auto root = fs::path(MERGEX_SOURCE_DIR) / "recipes";
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  }
  std::ranges::sort(files);
  for (const auto& file : files) {
    const auto recipe = recipes::read_recipe(file, {}, std::nullopt);
    const auto& json = recipe.document->value;
    const auto at = [&](const char* pointer) -> std::string {
      const Json::json_pointer place(pointer);
      return json.contains(place) && json[place].is_string() ? json[place].get<std::string>() : "";
    };
    if (at("/task/name").empty()) continue;  // what others extend
    std::vector<std::string> arguments{"finetune", file.string(), "--dry-run", "--out", (project / "none").string()};
    const auto set = [&](const std::string& assignment) {
      arguments.emplace_back("--set");
      arguments.push_back(assignment);
    };
    const auto is_quickstart = file.parent_path().filename() == "quickstart";
    if (!at("/model/checkpoint").empty()) {
      const auto& checkpoint = is_quickstart ? small : large;
      if (checkpoint.empty()) continue;
      set("/model/checkpoint=" + checkpoint);
      // The stand-in's head knows other classes.
      set("/model/new_head=true");
    } else if (!is_quickstart) {
      const auto tokenizer = test::data_path("tokenizers/t5");
      if (!tokenizer) continue;
      set("/model/tokenizer=" + tokenizer->string());
    }
    if (const auto data = at("/task/data_dir"); !data.empty()) {
      const auto found = test::data_path("glue/" + fs::path(data).filename().string());
      if (!found) continue;
      set("/task/data_dir=" + found->string());
    }
    const auto outcome = test::run_mergex(arguments);
    INFO(file << ": " << outcome.err);
    CHECK(outcome.exit_code == 0);
    CHECK_THAT(outcome.out, Contains("nothing was written"));
    ++checked;
  }
  CHECK(checked >= 2);
  CHECK_FALSE(fs::exists(project / "none"));
}

TEST_CASE("real GLUE with the real tokenizer, from random weights to a table", "[cli]") {
  const bool is_rte = GENERATE(true, false);
  const std::string name = is_rte ? "glue/rte" : "glue/mrpc", folder = is_rte ? "glue/RTE" : "glue/MRPC";
  const auto data = test::data_path(folder);
  const auto tokenizer = test::data_path("tokenizers/t5");
  if (!data || !tokenizer) return;
  const test::TinyProject project;
  auto recipe = project.recipe();
  recipe["model"]["tokenizer"] = tokenizer->string();
  auto& config = recipe["model"]["config"];
  config["vocab_size"] = 32128;
  config["d_model"] = 32;
  config["d_kv"] = 8;
  config["d_ff"] = 64;
  config["num_heads"] = 4;
  recipe["task"] = {{"name", name}, {"data_dir", data->string()}, {"max_length", 128}};
  recipe["training"]["max_steps"] = 2;
  recipe["evaluation"] = {{"every", 2}, {"batch_size", 32}};
  const Json ties{{"method", "camex"}, {"num_experts", 3}, {"protocol", "ties"}, {"curvature", {{"rank", 1}}}};
  recipe["sweep"] = {{"/experts", {{"dense", nullptr}, {"ties + curvature", ties}}}};
  const auto run = project.finetune(recipe, "out");
  CHECK_THAT(run.out, Contains("dense") && Contains("ties + curvature") && Contains("accuracy ×100"));
  CHECK_THAT(run.out, Contains("Always answering"));
  const auto split = first_split(project / "out/dense");
  CHECK(split["n"] == (is_rte ? 277 : 408));
  CHECK(split.contains("f1") == !is_rte);
  CHECK(split["accuracy"].get<double>() > 0.3);
  const auto right = split["accuracy"].get<double>() * split["n"].get<double>();  // L-44: a count of examples
  CHECK(right == Approx(std::round(right)).epsilon(1e-12));
  CHECK(fs::exists(project / "out/table.md"));
  CHECK(fs::exists(project / "out/scores.svg"));
}

}  // namespace
}  // namespace mergex
