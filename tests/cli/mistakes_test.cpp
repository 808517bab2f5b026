#include <functional>

#include "cli/tiny_project.h"
#include "io/safetensors.h"

namespace mergex {
namespace {
namespace fs = std::filesystem;

using Catch::Contains;
using io::Json;

/// A mistake is one line on stderr and exit code 2, and leaves nothing behind.
struct Mistakes {
  test::TinyProject project;
  int count = 0;

  std::string error(const fs::path& recipe, const std::vector<std::string>& more = {}) {
    const auto out = project / ("out-" + std::to_string(++count));
    std::vector<std::string> arguments{"finetune", recipe.string(), "--out", out.string()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto outcome = test::run_mergex(arguments);
    INFO(outcome.err);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.out.empty());
    CHECK(test::num_lines(outcome.err) == 1);
    CHECK_THAT(outcome.err, Catch::StartsWith("mergex: error: "));
    CHECK_FALSE(fs::exists(out));
    return outcome.err;
  }
  std::string error(const Json& recipe) { return error(project.write("recipe.json", recipe)); }
  /// As a single run, and as a row of a sweep.
  std::string error_of_both(const Json& recipe) {
    const auto text = error(recipe);
    CHECK(error(project / "recipe.json", {"--set", "/sweep={\"/seed\":[1,2]}"}) == text);
    return text;
  }
  Json recipe() const { return project.recipe(); }
};

/// A safetensors file written again, after a change to its tensors; their bytes live in `storage`.
void rewrite(const fs::path& file, const std::function<void(std::vector<io::TensorView>&)>& change) {
  std::vector<io::TensorView> views;
  std::vector<std::vector<std::byte>> storage;
  {
    const auto read = io::SafetensorsFile::open(file);
    for (const auto& view : read.tensors()) {
      storage.emplace_back(view.bytes.begin(), view.bytes.end());
      views.push_back(view);
      views.back().bytes = storage.back();
    }
  }
  change(views);
  io::write_safetensors(file, views);
}

TEST_CASE("ten mistakes give ten lines that name the place and the repair", "[cli][law]") {
  Mistakes m;
  auto recipe = m.recipe();
  SECTION("misspelt key") {
    recipe["training"]["bach_size"] = 4;
    CHECK_THAT(m.error(recipe),
               Contains("recipe.json#/training: unknown key \"bach_size\"; did you mean \"batch_size\"?"));
  }
  SECTION("wrong type") {
    recipe["training"]["batch_size"] = "four";
    CHECK_THAT(m.error(recipe), Contains("recipe.json#/training/batch_size: got \"four\", expected a whole number"));
    recipe["training"]["batch_size"] = 3.7;
    CHECK_THAT(m.error(recipe), Contains("recipe.json#/training/batch_size: got 3.7, expected a whole number"));
  }
  SECTION("out of range") {
    recipe["experts"] = {{"method", "camex"}, {"num_experts", 4}, {"router", {{"top_k", 9}}}};
    CHECK_THAT(m.error_of_both(recipe),
               Contains("recipe.json#/experts/router/top_k: got 9, expected 1..4 (num_experts is 4)"));
  }
  SECTION("unknown task") {
    recipe["task"]["name"] = "clasification";
    CHECK_THAT(m.error(recipe), Contains("recipe.json#/task/name: got \"clasification\"") &&
                                    Contains("did you mean \"classification\"?"));
  }
  SECTION("missing folder") {
    recipe["model"] = {{"checkpoint", "no/such/folder"}};
    CHECK_THAT(m.error_of_both(recipe),
               Contains((m.project / "no/such/folder").string() + ": no such folder, expected"));
    recipe = m.recipe();
    recipe["task"] = {{"name", "glue/rte"}, {"data_dir", "no/such/data"}};
    CHECK_THAT(m.error(recipe), Contains("no/such/data"));
  }
  SECTION("bad line of a TSV file") {
    test::write_text(m.project / "train.tsv", "text\tlabel\nin the beginning\told\nno label here\n");
    CHECK_THAT(m.error_of_both(recipe),
               Contains("train.tsv:3: found 1 column, expected 2") && Contains("on_bad_line=skip"));
    test::write_text(m.project / "train.tsv", "text\tlabel\nin the beginning\told\nfaith, hope\tnwe\n");
    CHECK_THAT(m.error(recipe), Contains("train.tsv:3: found label \"nwe\", expected \"old\" or \"new\""));
  }
  SECTION("unknown device") {
    const auto file = m.project.write("recipe.json", recipe);
    CHECK_THAT(m.error(file, {"--device", "gpu"}),
               Contains("--device: got \"gpu\", expected auto, cpu, cuda or cuda:N"));
    CHECK_THAT(m.error(file, {"--device", "cuda:one"}), Contains("--device: got \"cuda:one\""));
  }
  SECTION("options of the trainer that do not fit the model or the data") {
    recipe["training"]["parameter_groups"] = {{{"pattern", "encoder.*"}, {"learning_rate", 0.1}},
                                              {{"pattern", "decodr.*.wo.weight"}, {"frozen", true}}};
    CHECK_THAT(m.error_of_both(recipe),
               Contains("recipe.json#/training/parameter_groups/1/pattern: got \"decodr.*.wo.weight\"") &&
                   Contains("the nearest is \"decoder.block.0.layer.2.DenseReluDense.wo.weight\""));
    recipe = m.recipe();
    recipe["training"]["class_weights"] = {1, 2, 3};
    CHECK_THAT(m.error_of_both(recipe),
               Contains("recipe.json#/training/class_weights: got 3 numbers, but the task has 2 classes: old, new"));
    recipe["training"]["class_weights"] = "balanced";
    test::write_text(m.project / "train.tsv", "text\tlabel\nin the beginning\told\n");
    CHECK_THAT(m.error(recipe), Contains("/class_weights: got \"balanced\", but class \"new\" has no training example"));
    recipe = m.recipe();
    recipe["model"]["dtype"] = "float64";
    recipe["training"]["precision"] = "bfloat16";
    CHECK_THAT(m.error(recipe), Contains("recipe.json#/training/precision: ") && Contains("/model/dtype is float64"));
  }
  SECTION("repeated JSON key") {
    auto text = recipe.dump(2);
    text.insert(text.find("\"batch_size\""), "\"batch_size\": 4,\n");
    CHECK_THAT(m.error(test::write_text(m.project / "recipe.json", text)),
               Contains("recipe.json") && Contains("/training/batch_size: key given twice"));
  }
}

TEST_CASE("weights that do not fit are named before anything is written", "[cli][law]") {
  Mistakes m;
  auto trained = m.recipe();
  trained["training"]["max_steps"] = 1;
  m.project.finetune(trained, "trained");
  const auto checkpoint = m.project / "trained/checkpoints/step-1";
  const auto weights = checkpoint / "model.safetensors";
  auto recipe = m.recipe();
  recipe["model"] = {{"checkpoint", checkpoint.string()}};

  SECTION("two tensors of the wrong shape and one missing, all at once") {
    rewrite(weights, [](auto& views) {
      std::erase_if(views, [](const auto& view) { return view.name.ends_with("SelfAttention.q.weight"); });
      for (auto& view : views) {
        if (view.name.ends_with("wi.weight")) view.shape = {16, 32};
      }
    });
    const auto text = m.error(recipe);
    CHECK_THAT(text, Contains(checkpoint.string()) &&
                         Contains("DenseReluDense.wi.weight\" is [16, 32], expected [32, 16]"));
    CHECK_THAT(text, Contains("encoder.block.0.layer.0.SelfAttention.q.weight\" [8, 16] is missing"));
    CHECK_THAT(text, Contains("decoder.block.0.layer.0.SelfAttention.q.weight\" [8, 16] is missing"));
  }
  SECTION("truncated file") {
    fs::resize_file(weights, fs::file_size(weights) - 100);
    CHECK_THAT(m.error(recipe), Contains(weights.string()));
  }
  SECTION("truncated shard") {
    Json map = Json::object();
    const auto single = test::read_text(weights);
    const auto shard = checkpoint / "model-00001-of-00001.safetensors";
    test::write_text(shard, single.substr(0, single.size() / 2));
    const auto file = io::SafetensorsFile::open(weights);
    for (const auto& view : file.tensors()) map[view.name] = shard.filename().string();
    test::write_text(checkpoint / "model.safetensors.index.json", Json{{"weight_map", map}}.dump());
    fs::remove(weights);
    CHECK_THAT(m.error_of_both(recipe), Contains(shard.string()) && Contains("shared.weight"));
  }
  SECTION("a tokenizer with more pieces than the model has rows") {
    auto small = m.recipe();
    small["model"]["config"]["vocab_size"] = 100;
    CHECK_THAT(m.error(small), Contains("recipe.json#/model/config/vocab_size: got 100, but the tokenizer") &&
                                   Contains("has 2100 ids"));
    small["model"]["config"]["num_heads"] = 0;
    CHECK_THAT(m.error(small), Contains("recipe.json#/model/config/num_heads: got 0, expected 1.."));
  }
}

TEST_CASE("--overwrite deletes a run only when the new one can start", "[cli]") {
  const test::TinyProject project;
  auto recipe = project.recipe();
  recipe["training"]["max_steps"] = 1;
  project.finetune(recipe, "out");
  const auto before = test::contents(project / "out");
  recipe["task"]["files"]["train"] = "absent.tsv";
  project.finetune(recipe, "out", {"--overwrite"}, 2);
  CHECK(test::differences(before, test::contents(project / "out")).empty());
  recipe = project.recipe();
  recipe["training"]["max_steps"] = 2;
  project.finetune(recipe, "out", {"--overwrite"});
  CHECK(test::read_json(project / "out/results.json")["steps"] == 2);
  CHECK_FALSE(fs::exists(project / "out/checkpoints/step-1"));
}

TEST_CASE("class weights are refused where the answer is a text", "[cli]") {
  Mistakes m;
  const fs::path sst2 = m.project / "SST-2";
  fs::create_directories(sst2);
  for (const char* file : {"train.tsv", "dev.tsv"}) test::write_text(sst2 / file, "sentence\tlabel\na day\t1\na night\t0\n");
  auto recipe = m.recipe();
  recipe["model"]["head"] = "language_model";
  recipe["task"] = {{"name", "glue/sst2"}, {"data_dir", sst2.string()}, {"format", "text_to_text"}};
  recipe["training"]["class_weights"] = {1, 2};
  CHECK_THAT(m.error(recipe), Contains("trains on the tokens of its answers"));
}

TEST_CASE("length bucketing is refused where results depend on the padding", "[cli]") {
  Mistakes m;
  auto recipe = m.recipe();
  recipe["experts"] = {{"method", "camex"}, {"num_experts", 2}, {"pool_padding", "include"}};
  recipe["training"]["length_bucketing"] = true;
  CHECK_THAT(m.error(recipe), Contains("training/length_bucketing: got true") && Contains("pool_padding to \"exclude\""));
}

}  // namespace
}  // namespace mergex
