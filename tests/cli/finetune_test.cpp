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
  const auto curves = test::read_text(project / "out/curves.svg");
  for (const char* row : {"dense", "mixture", "ties"}) {
    CHECK_THAT(run.out, Contains(row));
    CHECK_THAT(markdown, Contains(fmt::format("| {} ", row)));
    CHECK_THAT(csv, Contains(fmt::format("\n{},", row)));
    CHECK_THAT(plot, Contains(row));
    CHECK_THAT(curves, Contains(fmt::format(">{}<", row)));
    for (int seed = 1; seed <= 3; ++seed) {
      const auto folder = project / "out" / fmt::format("{}.seed-{}", row, seed);
      CHECK(test::read_json(folder / "results.json")["seed"] == seed);
      CHECK_THAT(test::read_text(folder / "curves.svg"), Contains(">training<") && Contains(">validation<"));
    }
  }
  CHECK_THAT(markdown, Contains(" ± ") && Contains("accuracy ×100") && Contains("router entropy") &&
                           Contains("sample standard deviation over seeds"));
  CHECK(test::num_lines(csv) == 4);
  CHECK_THAT(plot, Catch::StartsWith("<svg"));
  CHECK_THAT(curves, Catch::StartsWith("<svg") && Contains("accuracy ×100, validation") &&
                         Contains("from the lowest seed to the highest"));
  CHECK_THAT(run.out, Contains((project / "out/table.md").string()) && Contains((project / "out/scores.svg").string()));
  CHECK(test::read_json(project / "out/results.json")["rows"].size() == 9);
}

TEST_CASE("TensorBoard gets event files where they are asked for, and nothing else changes", "[cli]") {
  const test::TinyProject project;
  const auto event_files = [&](const std::string& run) {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(project / run)) {
      if (entry.path().filename().string().starts_with("events.out.tfevents.")) found.push_back(entry.path());
    }
    return found;
  };
  auto recipe = project.recipe();
  recipe["training"]["log_every"] = 2;
  project.finetune(recipe, "without");
  CHECK(event_files("without").empty());
  project.finetune(recipe, "with", {"--set", "/training/tensorboard=true"});
  const auto files = event_files("with");
  REQUIRE(files.size() == 1);
  const auto events = test::read_text(files[0]);
  for (const char* tag : {"train/loss", "train/learning_rate", "train/grad_norm", "train/examples_per_s",
                          "validation/loss", "validation/accuracy"}) {
    CHECK_THAT(events, Contains(tag));
  }
  CHECK_THAT(events, !Contains("step") && !Contains("epoch") && !Contains("validation/n"));
  CHECK(test::read_text(project / "with/metrics.jsonl") == test::read_text(project / "without/metrics.jsonl"));
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
    for (const auto& line : test::json_lines(project / "trained/predictions.jsonl")) {
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
  for (const auto& line : test::json_lines(project / "trained/metrics.jsonl")) {
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
  const auto predictions = test::json_lines(project / "more/predictions.jsonl");
  REQUIRE(predictions.size() == 25);
  for (std::size_t i = 0; i < predictions.size(); ++i) CHECK(predictions[i]["gold"].is_null() == (i >= 20));

  test::write_text(project / "validation.tsv", "text\tlabel\nking\t-1\nfaith\t-1\n");
  const auto none = project.finetune(recipe, "none", {}, 2);
  CHECK_THAT(none.err, Contains("none of its 2 examples has a label"));
  CHECK_FALSE(fs::exists(project / "none"));
}

TEST_CASE("every option of the trainer together, from the plan to the result", "[cli]") {
  const test::TinyProject project;
  const auto recipe = project.featured_recipe(60);
  const auto plan = project.finetune(recipe, "plan", {"--dry-run"});
  CHECK_THAT(plan.out, Contains("group       encoder.*.layer_norm.weight: 32 parameters in 2 tensors, frozen") &&
                           Contains("group       *.router.*: ") && Contains("tensors, learning_rate 0.05") &&
                           Contains("adafactor with peak learning rate 0.02") && Contains("| trained "));
  const auto json = io::parse_json(project.finetune(recipe, "plan", {"--dry-run", "--json"}).out, "plan")[0];
  CHECK(json["parameters"]["trained"].get<int>() == json["parameters"]["total"].get<int>() - 32);

  const auto run = project.finetune(recipe, "out");
  const auto result = test::read_json(project / "out/results.json");
  CHECK(result["stopped_early"] == (result["steps"] < 60));
  // The resolved recipe runs again, and gives the same.
  const test::TinyProject elsewhere;
  elsewhere.finetune(test::read_json(project / "out/recipe.resolved.json"), "out");
  CHECK(test::differences(test::contents(project / "out"), test::contents(elsewhere / "out")).empty());
}

TEST_CASE("the resolved recipe runs again, and gives the same", "[cli][law]") {
  const test::TinyProject project;
  project.finetune(project.random_recipe(4), "out");
  const auto resolved = test::read_json(project / "out/recipe.resolved.json");
  const test::TinyProject elsewhere;
  elsewhere.finetune(resolved, "out");
  CHECK(test::differences(test::contents(project / "out"), test::contents(elsewhere / "out")).empty());
}

/// Three examples in the layout of a GLUE task's files, as train.tsv and under the name of its validation file.
void write_glue(const fs::path& folder, const std::string& task) {
  std::string header, row;
  if (task == "sst2") {
    header = "sentence\tlabel\n", row = "a fine film\t1\n";
  } else if (task == "cola") {
    row = "gj04\t1\t\tThe sailors rode the breeze.\n";
  } else if (task == "mrpc") {
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n", row = "1\t1\t2\tIt rained.\tThere was rain.\n";
  } else if (task == "stsb") {
    header = "index\tsentence1\tsentence2\tscore\n", row = "0\tIt rained.\tThere was rain.\t4.5\n";
  } else if (task == "rte") {
    header = "index\tsentence1\tsentence2\tlabel\n", row = "0\tIt rained.\tThere was rain.\tentailment\n";
  } else if (task == "qnli") {
    header = "index\tquestion\tsentence\tlabel\n", row = "0\tDid it rain?\tThere was rain.\tentailment\n";
  } else if (task == "mnli") {
    header = "index\tsentence1\tsentence2\tgold_label\n", row = "0\tIt rained.\tThere was rain.\tentailment\n";
  } else {
    FAIL("no layout for " << task);
  }
  for (const char* file : {"train.tsv", task == "mnli" ? "dev_matched.tsv" : "dev.tsv"}) {
    test::write_text(folder / file, header + row + row + row);
  }
}

constexpr const char* kT5Base =
    R"({"model_type": "t5", "vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12})";

/// Dry run of a recipe of recipes/camex with random weights of T5-base's shape (its checkpoints have to be downloaded
/// first) and made-up data.
test::Outcome dry_run_camex(const test::TinyProject& project, const fs::path& file) {
  const auto recipe = recipes::read_recipe(file, {}, std::nullopt);
  const auto& json = recipe.document->value;
  const auto task = json["task"]["name"].get<std::string>().substr(std::string("glue/").size());
  const auto data = project / task;
  if (!fs::exists(data)) {
    fs::create_directories(data);
    write_glue(data, task);
  }
  const auto tokenizer = test::data_path("tokenizers/t5").value_or(test::tiny_tokenizer());
  std::vector<std::string> sets{"/task/data_dir=" + data.string(), "/model/tokenizer=" + tokenizer.string()};
  if (json["model"].contains("checkpoint")) {
    sets.insert(sets.end(), {"/model/checkpoint=null", std::string("/model/config=") + kT5Base});
  }
  std::vector<std::string> arguments{"finetune", file.string(), "--dry-run", "--device", "cpu", "--out",
                                     (project / "none").string()};
  for (const auto& set : sets) arguments.insert(arguments.end(), {"--set", set});
  return test::run_mergex(arguments);
}

std::vector<fs::path> recipes_in(const std::string& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(fs::path(MERGEX_SOURCE_DIR) / "recipes" / folder)) {
    if (entry.path().extension() != ".json") continue;
    // Those without a task are what others extend.
    if (recipes::read_recipe(entry.path(), {}, std::nullopt).document->value.contains(Json::json_pointer("/task/name"))) {
      files.push_back(entry.path());
    }
  }
  std::ranges::sort(files);
  return files;
}

void check_dry_runs(const std::vector<fs::path>& files) {
  const test::TinyProject project;
  for (const auto& file : files) {
    const auto outcome = dry_run_camex(project, file);
    INFO(file << ": " << outcome.err);
    CHECK(outcome.exit_code == 0);
    CHECK_THAT(outcome.out, Contains("nothing was written"));
  }
  CHECK_FALSE(fs::exists(project / "none"));
}

TEST_CASE("recipes of the quickstart pass a dry run", "[cli]") {
  const test::TinyProject project;
  auto stand_in = project.recipe();  // for the checkpoint that one of them has to be given
  stand_in["training"]["max_steps"] = 0;
  project.finetune(stand_in, "pretrained");
  const auto files = recipes_in("quickstart");
  CHECK(files.size() == 2);
  for (const auto& file : files) {
    std::vector<std::string> arguments{"finetune", file.string(), "--dry-run", "--out", (project / "none").string()};
    const auto recipe = recipes::read_recipe(file, {}, std::nullopt);
    if (recipe.document->value["model"].contains("checkpoint")) {
      // The stand-in's head knows other classes.
      arguments.insert(arguments.end(), {"--set", "/model/new_head=true", "--set",
                                         "/model/checkpoint=" + (project / "pretrained/checkpoints/best").string()});
    }
    const auto outcome = test::run_mergex(arguments);
    INFO(file << ": " << outcome.err);
    CHECK(outcome.exit_code == 0);
    CHECK_THAT(outcome.out, Contains("nothing was written"));
  }
  CHECK_FALSE(fs::exists(project / "none"));
}

TEST_CASE("some recipes of the CAMEx tables pass a dry run", "[cli]") {
  std::vector<fs::path> files;
  for (const char* name : {"cola-t5-base-dare-ca", "cost-t5-base", "mnli-t5-base-smoe", "mrpc-t5-base-ties", "qnli-t5-base",
                           "rte-t5-base-num-experts", "sst2-small", "stsb-t5-small-rank"}) {
    files.push_back(fs::path(MERGEX_SOURCE_DIR) / "recipes/camex" / (std::string(name) + ".json"));
  }
  check_dry_runs(files);
}

TEST_CASE("every recipe of the CAMEx tables passes a dry run", "[cli][.slow]") {
  const auto files = recipes_in("camex");
  CHECK(files.size() >= 7 * 9 + 3 * 4 + 1);
  check_dry_runs(files);
}

TEST_CASE("a dry run of the cost recipe gives the parameters of the CAMEx paper's models", "[cli]") {
  const test::TinyProject project;
  const auto outcome = dry_run_camex(project, fs::path(MERGEX_SOURCE_DIR) / "recipes/camex/cost-t5-base.json");
  // Counted by hand from the shapes of T5-base, 7 experts beside the base: 1,015,627,008 with experts.
  CHECK_THAT(outcome.out, Contains("dense 222903552 |") && Contains("experts 792723456 |") &&
                              Contains("routers 1290240 |") && Contains("curvature 2688000 |") &&
                              Contains("curvature 21504000 |"));
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
