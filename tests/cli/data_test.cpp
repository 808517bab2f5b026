// Where data meet the program: text-to-text tasks, subsets, and the cache of encoded data.

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "cli/tiny_project.h"

namespace mergex {
namespace {
namespace fs = std::filesystem;

using Catch::Contains;
using io::Json;

std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> found;
  if (!fs::exists(folder)) return found;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) found.push_back(entry.path());
  }
  std::ranges::sort(found);
  return found;
}

/// The tiny sentences as an SST-2 table, to be answered in words.
Json text_to_text(const test::TinyProject& project) {
  for (const auto& [name, count, seed] : {std::tuple{"sst/train.tsv", 40u, 1u}, {"sst/dev.tsv", 20u, 2u}}) {
    auto table = test::tiny_sentences(count, seed);
    table.replace(0, table.find('\n'), "sentence\tlabel");
    for (const auto& [from, to] : {std::pair<std::string, std::string>{"\told\n", "\t0\n"}, {"\tnew\n", "\t1\n"}}) {
      for (auto at = table.find(from); at != std::string::npos; at = table.find(from)) table.replace(at, from.size(), to);
    }
    test::write_text(project / name, table + (seed == 2u ? "king and grace\t-1\n" : ""));
  }
  auto recipe = project.recipe();
  recipe["task"] = {{"name", "glue/sst2"}, {"data_dir", "sst"}, {"format", "text_to_text"}, {"max_length", 32}};
  recipe["model"]["head"] = "language_model";
  return recipe;
}

TEST_CASE("text to text: the model writes its answers, and learns to write the classes' names", "[cli]") {
  const test::TinyProject project;
  auto recipe = text_to_text(project);
  recipe["training"]["max_steps"] = 400;
  recipe["model"]["dropout"] = 0.0;
  recipe["training"]["optimizer"]["learning_rate"] = 0.01;
  recipe["evaluation"] = {{"every", 400}, {"batch_size", 8}};
  project.finetune(recipe, "out");
  const auto results = test::read_json(project / "out/results.json");
  const auto split = results["splits"][0];
  CHECK(split["n"] == 20);
  CHECK(split["unparsable"] == 0);
  const auto predictions = test::json_lines(project / "out/predictions.jsonl");
  REQUIRE(predictions.size() == 21);
  int right = 0;
  for (const auto& p : predictions) {
    CHECK(p["prediction"] == p["text"]);
    CHECK((p["text"] == "negative" || p["text"] == "positive"));
    CHECK_FALSE(p.contains("scores"));
    right += !p["gold"].is_null() && p["gold"] == p["prediction"] ? 1 : 0;
  }
  CHECK(predictions.back()["gold"].is_null());
  CHECK(split["accuracy"].get<double>() == Approx(right / 20.0));
  CHECK(fs::exists(project / "out/checkpoints/best/model.safetensors"));
}

TEST_CASE("text to text: answers that name no class are wrong, counted, and said", "[cli]") {
  const test::TinyProject project;
  auto recipe = text_to_text(project);
  recipe["training"]["max_steps"] = 0;  // random weights write anything
  const auto run = project.finetune(recipe, "out");
  const auto split = test::read_json(project / "out/results.json")["splits"][0];
  CHECK(split["unparsable"] == 20);
  CHECK(split["accuracy"] == 0.0);
  CHECK(split["collapsed"] == "collapsed: none of the 21 predictions names a class");
  for (const auto& p : test::json_lines(project / "out/predictions.jsonl")) CHECK(p["prediction"].is_null());
  CHECK_THAT(test::read_text(project / "out/table.md"),
             Contains("dense (seed 42) on validation: 20 of 20 generated answers name no class, and are wrong."));
  CHECK_THAT(test::read_text(project / "out/table.md"), !Contains("unparsable"));

  // A mixture of experts may stand in a decoder that generates; routing by sentence may not.
  recipe["experts"] = {{"method", "smoe"}, {"num_experts", 2}, {"router", {{"top_k", 1}}}};
  project.finetune(recipe, "smoe");
  recipe["experts"] = {{"method", "camex"}, {"num_experts", 2}};
  const auto refused = project.finetune(recipe, "camex", {}, 2);
  CHECK(test::num_lines(refused.err) == 1);
  recipe.erase("experts");
  recipe["model"]["head"] = "classification";
  CHECK_THAT(project.finetune(recipe, "head", {}, 2).err,
             Contains("/model/head: got \"classification\", which task \"glue/sst2\" cannot train; expected \"language_model\""));
}

TEST_CASE("text to text: a tokenizer that cannot write the answers is refused", "[cli]") {
  const test::TinyProject project;  // its tokenizer has no "_"
  auto recipe = text_to_text(project);
  recipe["task"]["name"] = "glue/rte";
  test::write_text(project / "sst/train.tsv", "sentence1\tsentence2\tlabel\na\tb\t1\n");
  test::write_text(project / "sst/dev.tsv", "sentence1\tsentence2\tlabel\na\tb\t1\n");
  const auto refused = project.finetune(recipe, "out", {}, 2);
  CHECK_THAT(refused.err, Contains("writes the answer \"not_entailment\" as \"not") && Contains("/task/format: got"));
  CHECK_FALSE(fs::exists(project / "out"));
}

TEST_CASE("text to text resumes to the same bytes", "[cli][law]") {
  const test::TinyProject project;
  auto recipe = text_to_text(project);
  recipe["training"]["gradient_accumulation"] = 2;
  recipe["training"]["keep_checkpoints"] = 9;
  project.finetune(recipe, "whole");
  // As if it had been killed after the first evaluation.
  fs::copy(project / "whole", project / "parts", fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  for (const char* name : {"results.json", "predictions.jsonl", "table.md", "table.csv", "scores.svg", "checkpoints/best"}) {
    fs::remove(project / "parts" / name);
  }
  fs::remove_all(project / "parts/checkpoints/step-6");
  fs::create_directory_symlink("step-3", project / "parts/checkpoints/best");
  project.finetune(recipe, "parts", {"--resume"});
  CHECK(test::differences(test::contents(project / "whole"), test::contents(project / "parts")).empty());
}

TEST_CASE("a run from the cache is the same run", "[cli][law]") {
  const test::TinyProject project;
  const auto kind = GENERATE(0, 1, 2);
  auto recipe = kind == 0 ? project.recipe() : text_to_text(project);
  if (kind == 2) {
    recipe["task"] = {{"name", "span_corruption"}, {"files", {{"train", "train.tsv"}, {"validation", "validation.tsv"}}}};
    recipe["task"]["max_length"] = 16;
  }
  const auto first = project.finetune(recipe, "first", {"-v"});
  CHECK_THAT(first.err, Contains("encoded, kept in " + (project / "cache").string()));
  const auto cached = files_in(project / "cache");
  REQUIRE(cached.size() == 1);
  const auto second = project.finetune(recipe, "second", {"-v"});
  CHECK_THAT(second.err, Contains("encoded before, read from " + cached[0].string()));
  const auto before = test::contents(project / "first");
  CHECK(test::differences(before, test::contents(project / "second")).empty());

  // Without it; the recipe alone differs.
  const auto third = project.finetune(recipe, "third", {"-v", "--set", "/task/cache=false"});
  CHECK_THAT(third.err, !Contains("encoded"));
  CHECK(test::differences(before, test::contents(project / "third")) == std::vector<std::string>{"recipe.resolved.json differs"});

  // A damaged file is left alone and written anew.
  const auto whole = test::read_text(cached[0]);
  for (const auto& damaged : {whole.substr(0, whole.size() / 2), std::string(), whole.substr(0, whole.size() - 1) + "\x7F"}) {
    test::write_text(cached[0], damaged);
    fs::remove_all(project / "again");
    const auto again = project.finetune(recipe, "again", {"-v"});
    CHECK_THAT(again.err, Contains("cache not used: ") && Contains("encoded, kept in "));
    CHECK(test::read_text(cached[0]) == whole);
    CHECK(test::differences(before, test::contents(project / "again")).empty());
  }
}

TEST_CASE("the cache follows the data, is not needed, and a dry run writes none", "[cli]") {
  const test::TinyProject project;
  const auto recipe = project.recipe();
  project.finetune(recipe, "dry", {"--dry-run"});
  CHECK(files_in(project / "cache").empty());
  project.finetune(recipe, "first");
  CHECK(files_in(project / "cache").size() == 1);
  const auto dry = project.finetune(recipe, "dry", {"--dry-run", "-v"});
  CHECK_THAT(dry.err, Contains("read from"));

  test::write_text(project / "train.tsv", test::tiny_sentences(30, 7));
  const auto changed = project.finetune(recipe, "changed", {"-v"});
  CHECK_THAT(changed.err, Contains("kept in"));
  CHECK(files_in(project / "cache").size() == 2);

  // What is said of the files is said again from the cache.
  auto with_bad_line = recipe;
  with_bad_line["task"]["on_bad_line"] = "skip";
  test::write_text(project / "train.tsv", test::tiny_sentences(30, 7) + "one\ttwo\tthree\nno label\t-1\n");
  const auto fresh = project.finetune(with_bad_line, "fresh"), cached = project.finetune(with_bad_line, "cached");
  for (const auto* run : {&fresh, &cached}) {
    CHECK_THAT(run->err, Contains("1 malformed line skipped") && Contains("have no label and are left out of training"));
  }
  CHECK(test::differences(test::contents(project / "fresh"), test::contents(project / "cached")).empty());

  // A file where the folder should be: the run goes on without.
  fs::remove_all(project / "cache");
  test::write_text(project / "cache", "in the way");
  test::write_text(project / "train.tsv", test::tiny_sentences(30, 7));
  const auto without = project.finetune(recipe, "without", {"-v"});
  CHECK_THAT(without.err, Contains("encoded, not kept: "));
}

TEST_CASE("max_examples: rows of different seeds see the same examples", "[cli]") {
  const test::TinyProject project;
  auto recipe = project.recipe();
  recipe["task"]["max_examples"] = {{"train", 10}, {"validation", 7}};
  recipe["sweep"] = {{"/seed", {1, 2}}};
  project.finetune(recipe, "out");
  std::vector<std::set<std::string>> seen(2);
  for (std::size_t seed = 1; seed <= 2; ++seed) {
    const auto folder = project / "out" / fmt::format("seed-{}", seed);
    CHECK(test::read_json(folder / "results.json")["splits"][0]["n"] == 7);
    for (const auto& p : test::json_lines(folder / "predictions.jsonl")) seen[seed - 1].insert(p["id"].get<std::string>());
  }
  CHECK(seen[0].size() == 7);
  CHECK(seen[0] == seen[1]);
  CHECK_THAT(project.finetune(recipe, "dry", {"--dry-run"}).out, Contains("10 training examples, 7 validation"));
}

}  // namespace
}  // namespace mergex
