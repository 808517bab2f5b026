#include <algorithm>
#include <csignal>

#include "cli/tiny_project.h"
#include "io/checkpoint_folder.h"
#include "support/checkpoints.h"

// `mergex merge` as a user runs it.

namespace mergex {
namespace {
namespace fs = std::filesystem;
using Catch::Contains;
using io::Json;
using Words = std::vector<std::string>;

/// A base and three models that were "trained" from it, and a TIES recipe of them.
struct MergeProject {
  MergeProject() {
    for (const auto* model : {"base", "a", "b", "c"}) {
      test::make_checkpoint(folder / model, test::llama_config(3, 29), test::llama_tensors(3, 29, std::hash<std::string>{}(model)),
                            model == std::string("b") ? 3 : 1);
    }
  }

  Json recipe() const {
    Json merge{{"method", "ties"}, {"base_model", "base"}, {"models", Json::array()}, {"parameters", {{"lambda", 0.9}}}};
    for (const auto* model : {"a", "b", "c"}) merge["models"].push_back({{"model", model}, {"parameters", {{"weight", 0.5}, {"density", 0.4}}}});
    return {{"name", "pair"}, {"merge", std::move(merge)}};
  }

  test::Outcome merge(const Json& recipe, const std::string& out, Words more = {}) const {
    io::write_json(folder / "recipe.json", recipe);
    Words arguments{"merge", (folder / "recipe.json").string(), "--out", (folder / out).string()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return test::run_mergex(arguments);
  }

  /// The one line of a mistake, which leaves no folder behind.
  std::string mistake(const Json& recipe, Words more = {}) const {
    const auto outcome = merge(recipe, "out", std::move(more));
    INFO(outcome.err);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK(test::num_lines(outcome.err) == 1);
    CHECK_FALSE(fs::exists(folder / "out"));
    CHECK_FALSE(fs::exists(folder / "out.partial"));
    return outcome.err;
  }

  test::TemporaryFolder folder;
};

}  // namespace

TEST_CASE("ten mistakes of a merge give ten lines that name the repair", "[cli][law]") {
  const MergeProject project;
  auto recipe = project.recipe();
  auto& merge = recipe["merge"];
  SECTION("the method is misspelt") {
    merge["method"] = "tise";
    CHECK_THAT(project.mistake(recipe), Contains("#/merge/method") && Contains("did you mean \"ties\"?") && Contains("--list"));
  }
  SECTION("the base is missing") {
    merge.erase("base_model");
    CHECK_THAT(project.mistake(recipe), Contains("\"base_model\" is missing") && Contains("name the model"));
  }
  SECTION("a folder is missing") {
    merge["models"][1]["model"] = "bb";
    CHECK_THAT(project.mistake(recipe), Contains("#/merge/models/1/model") && Contains("no folder") && Contains("check the path"));
  }
  SECTION("a model of a hub") {
    merge["models"][1]["model"] = "org/model-7b";
    CHECK_THAT(project.mistake(recipe), Contains("is downloaded first"));
  }
  SECTION("shapes differ") {
    auto tensors = test::llama_tensors(3, 29, 1);
    tensors[1].shape = {9, 8};
    test::make_checkpoint(project.folder / "c", test::llama_config(3, 29), tensors);
    CHECK_THAT(project.mistake(recipe), Contains("\"model.layers.0.self_attn.q_proj.weight\" is [9, 8] in c and [8, 8] in base"));
  }
  SECTION("another vocabulary") {
    test::make_checkpoint(project.folder / "c", test::llama_config(3, 31), test::llama_tensors(3, 31, 1));
    CHECK_THAT(project.mistake(recipe), Contains("\"model.embed_tokens.weight\" is [31, 8] in c and [29, 8] in base") && Contains("tokenizer_source"));
  }
  SECTION("a density above 1") {
    merge["models"][0]["parameters"]["density"] = 1.5;
    CHECK_THAT(project.mistake(recipe), Contains("#/merge/models/0/parameters/density: got 1.5, expected a number") && Contains("at most 1"));
  }
  SECTION("an unknown parameter") {
    merge["models"][0]["parameters"]["wieght"] = 1.5;
    CHECK_THAT(project.mistake(recipe), Contains("no such parameter; did you mean \"weight\"?"));
  }
  SECTION("a parameter of all models with one") {
    merge["models"][0]["parameters"]["lambda"] = 1.5;
    CHECK_THAT(project.mistake(recipe), Contains("holds for all models together"));
  }
  SECTION("an unknown key") {
    merge["out_dtpye"] = "bfloat16";
    CHECK_THAT(project.mistake(recipe), Contains("did you mean \"out_dtype\"?"));
  }
  SECTION("a filter that matches nothing") {
    merge["models"][0]["parameters"]["weight"] = {{{"filter", "self_atn"}, {"value", 1.0}}, {{"value", 0.5}}};
    CHECK_THAT(project.mistake(recipe), Contains("\"self_atn\"") && Contains("did you mean \"self_attn\"?"));
  }
  SECTION("weights that sum to zero") {
    merge = {{"method", "linear"}, {"models", {{{"model", "a"}, {"parameters", {{"weight", 1.0}}}}, {{"model", "b"}, {"parameters", {{"weight", -1.0}}}}}}};
    CHECK_THAT(project.mistake(recipe), Contains("sum to zero") || Contains("sum to 0"));
  }
  SECTION("a shard is cut") {
    const auto shard = project.folder / "b/model-00002-of-00003.safetensors";
    fs::resize_file(shard, fs::file_size(shard) - 1);
    CHECK_THAT(project.mistake(recipe), Contains("model-00002-of-00003.safetensors: truncated") && Contains("copy it again"));
  }
  SECTION("a folder that is not empty") {
    test::write_text(project.folder / "full/mine.txt", "keep me");
    const auto outcome = project.merge(recipe, "full");
    CHECK(outcome.exit_code == 2);
    CHECK(test::num_lines(outcome.err) == 1);
    CHECK_THAT(outcome.err, Contains("--overwrite"));
    CHECK(test::read_text(project.folder / "full/mine.txt") == "keep me");
  }
}

TEST_CASE("mistakes are found before any data is read", "[cli][law]") {  // T6
  const MergeProject project;
  // Valid headers over a hole: reading would not fail, but it would be seen as pages in memory.
  for (const auto* model : {"base", "a", "c"}) {
    const auto file = project.folder / model / "model.safetensors";
    REQUIRE(fs::exists(file));
  }
  auto recipe = project.recipe();
  recipe["merge"]["slices"] = {{{"sources", {{{"model", "a"}, {"layer_range", {0, 9}}}}}}};
  recipe["merge"].erase("models");
  CHECK_THAT(project.mistake(recipe), Contains("layer_range") && Contains("[0, 9]") && Contains("3 layers"));
}

TEST_CASE("mergekit's YAML runs as it is", "[cli][law]") {
  const MergeProject project;
  const auto yaml = project.folder / "config.yaml";
  test::write_text(yaml,
                   "models:\n  - model: a\n    parameters:\n      weight: 0.5\n  - model: b\n    parameters:\n      weight: [0.1, 0.9]\n"
                   "merge_method: task_arithmetic\nbase_model: base\nparameters:\n  lambda: 0.5\ndtype: float32\nout_dtype: bfloat16\n");
  const auto outcome = test::run_mergex({"merge", yaml.string(), "--out", (project.folder / "out").string()});
  INFO(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const io::CheckpointFolder result(project.folder / "out");
  CHECK(result.tensors().size() == io::CheckpointFolder(project.folder / "base").tensors().size());
  CHECK(result.config()["torch_dtype"] == "bfloat16");
  // The resolved recipe makes the same files.
  const auto manifest = test::read_json(project.folder / "out/manifest.json");
  io::write_json(project.folder / "again.json", manifest["recipe"]);
  CHECK(test::run_mergex({"merge", (project.folder / "again.json").string(), "--out", (project.folder / "out2").string()}).exit_code == 0);
  CHECK(test::read_text(project.folder / "out/model.safetensors") == test::read_text(project.folder / "out2/model.safetensors"));
  // A mistake names the line.
  test::write_text(yaml, "models:\n  - model: a\n    parameters:\n      wieght: 0.5\nmerge_method: linear\n");
  const auto wrong = test::run_mergex({"merge", yaml.string(), "--out", (project.folder / "out3").string()});
  CHECK(wrong.exit_code == 2);
  CHECK_THAT(wrong.err, Contains("config.yaml:4") && Contains("did you mean \"weight\"?"));
}

TEST_CASE("documents of one file build on each other", "[cli][law]") {
  const MergeProject project;
  const auto yaml = project.folder / "steps.yaml";
  test::write_text(yaml,
                   "name: first\nmodels:\n  - {model: a, parameters: {weight: 1}}\n  - {model: b, parameters: {weight: 1}}\nmerge_method: linear\n"
                   "---\nmodels:\n  - {model: first, parameters: {weight: 1}}\n  - {model: c, parameters: {weight: 1}}\nmerge_method: linear\n");
  const auto outcome = test::run_mergex({"merge", yaml.string(), "--out", (project.folder / "out").string()});
  INFO(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  const auto value = [&](const char* model) { return test::values_of(*io::CheckpointFolder(project.folder / model).find("model.norm.weight")); };
  const auto a = value("a"), b = value("b"), c = value("c"), ours = value("out");
  for (std::size_t i = 0; i < a.size(); ++i) CHECK(ours[i] == Approx(0.25 * a[i] + 0.25 * b[i] + 0.5 * c[i]).margin(1e-7));
}

TEST_CASE("a plan, an explanation and a list print and write nothing", "[cli][law]") {
  const MergeProject project;
  const auto plan = project.merge(project.recipe(), "out", {"--dry-run"});
  CHECK(plan.exit_code == 0);
  CHECK_THAT(plan.out, Contains("3 x model.layers.*.mlp.up_proj.weight") && Contains("ties") && Contains("density 0.4") && Contains("writes 30 tensors"));
  const auto json = project.merge(project.recipe(), "out", {"--dry-run", "--json"});
  CHECK(Json::parse(json.out)["tensors"].size() == 30);
  const auto explained = project.merge(project.recipe(), "out", {"--explain", "model.norm.weight"});
  CHECK_THAT(explained.out, Contains("model.norm.weight") && Contains("of a (") && Contains("of base (") && Contains("weight 0.5"));
  CHECK_THAT(project.mistake(project.recipe(), {"--explain", "model.nrom.weight"}), Contains("did you mean \"model.norm.weight\"?"));
  CHECK_FALSE(fs::exists(project.folder / "out"));
  const auto list = test::run_mergex({"merge", "--list"});
  CHECK_THAT(list.out, Contains("  ties ") && Contains("density") && Contains("arXiv"));
}

TEST_CASE("a merged folder verifies, and differs from what it was made of", "[cli][law]") {
  const MergeProject project;
  REQUIRE(project.merge(project.recipe(), "out").exit_code == 0);
  const auto out = (project.folder / "out").string();
  CHECK(test::run_mergex({"merge", "--verify", out}).exit_code == 0);
  const auto diff = test::run_mergex({"merge", "--diff", (project.folder / "base").string(), out, "--json"});
  CHECK(diff.exit_code == 0);
  CHECK(Json::parse(diff.out).dump().find("model.layers.0.mlp.up_proj.weight") != std::string::npos);
  const auto same = test::run_mergex({"merge", "--diff", out, out});
  CHECK(same.exit_code == 0);
  // One flipped bit is found, and named.
  auto bytes = test::read_text(project.folder / "out/model.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  test::write_text(project.folder / "out/model.safetensors", bytes);
  const auto damaged = test::run_mergex({"merge", "--verify", out});
  CHECK(damaged.exit_code == 2);
  CHECK_THAT(damaged.err + damaged.out, Contains("model.safetensors") || Contains("weight"));
}

TEST_CASE("a merge that is killed at any moment goes on to the same bytes", "[cli][slow]") {
  const MergeProject project;
  auto tensors = test::llama_tensors(12, 1000, 1);
  for (auto& tensor : tensors) {
    if (tensor.shape.size() == 2) tensor.shape = {tensor.shape[0] * 16, tensor.shape[1] * 16};
  }
  for (const auto* model : {"base", "a", "b", "c"}) {
    fs::remove_all(project.folder / model);
    for (auto& tensor : tensors) tensor.seed = std::hash<std::string>{}(model);
    test::make_checkpoint(project.folder / model, test::llama_config(12, 16000), tensors, 2);
  }
  auto recipe = project.recipe();
  recipe["merge"]["method"] = "dare_ties";
  const Words small{"--memory", "64MiB", "--shard-size", "4MB", "--quiet"};
  const auto whole = project.merge(recipe, "whole", small);
  INFO(whole.err);
  REQUIRE(whole.exit_code == 0);
  const auto expected = test::folder_content(project.folder / "whole");
  std::uint64_t state = 12345;
  int killed = 0;
  for (int round = 0; round < 100; ++round) {
    fs::remove_all(project.folder / "out");
    fs::remove_all(project.folder / "out.partial");
    for (int attempt = 0; attempt < 50; ++attempt) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      const double after_s = whole.wall_s * static_cast<double>(state >> 40) / static_cast<double>(1 << 24);
      Words arguments{"merge", (project.folder / "recipe.json").string(), "--out", (project.folder / "out").string(), "--resume"};
      arguments.insert(arguments.end(), small.begin(), small.end());
      const auto outcome = attempt == 2 ? test::run_mergex(arguments)
                                        : test::run_mergex(arguments, test::Interruption{.signal = SIGKILL, .after_s = after_s});
      if (outcome.exit_code == 0) break;
      killed += outcome.signal == SIGKILL ? 1 : 0;
      CHECK_FALSE(fs::exists(project.folder / "out"));  // nothing looks finished
    }
    const auto content = test::folder_content(project.folder / "out");
    REQUIRE(content.size() == expected.size());
    for (std::size_t i = 0; i < content.size(); ++i) {
      INFO(content[i].first);
      CHECK(content[i].first == expected[i].first);
      if (content[i].first != "timing.json") CHECK((content[i].second == expected[i].second));
    }
  }
  CHECK(killed >= 60);
}

}  // namespace mergex
