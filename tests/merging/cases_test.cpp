#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "io/atomic_file.h"
#include "io/checkpoint_folder.h"
#include "io/sha256.h"
#include "merging/execute.h"
#include "merging/planner.h"
#include "support/catch.h"
#include "support/checkpoints.h"
#include "support/paths.h"

// Merges that break other tools, reported in public, on small models.

namespace mergex::merging {
namespace {
namespace fs = std::filesystem;
using Catch::Contains;
using io::DType;
using io::Json;
using test::MadeTensor;

MergePlan plan_of(const fs::path& folder, Json merge) {
  auto document = std::make_shared<io::JsonDocument>();
  document->value = Json{{"merge", std::move(merge)}};
  document->file = (folder / "recipe.json").string();
  io::JsonObject root(document);
  const auto section = read_merge_section(root, RelativeTo::kRecipe);
  root.finish();
  return plan_merge(section, 7);
}

// Merges into `folder`/out and opens the result.
io::CheckpointFolder merged(const fs::path& folder, const Json& merge, std::size_t threads = 2) {
  execute(plan_of(folder, merge), {.out = folder / "out", .threads = threads, .overwrite = true});
  return io::CheckpointFolder(folder / "out");
}

std::uint64_t total_bytes(const io::CheckpointFolder& checkpoint) {
  std::uint64_t bytes = 0;
  for (const auto* tensor : checkpoint.tensors()) bytes += tensor->bytes.size();
  return bytes;
}

std::vector<std::string> names(const io::CheckpointFolder& checkpoint) {
  std::vector<std::string> all;
  for (const auto* tensor : checkpoint.tensors()) all.push_back(tensor->name);
  std::ranges::sort(all);
  return all;
}

// A recipe of this method over as many models as it takes, with every required parameter given.
Json recipe_for(const Method& method, const std::vector<std::string>& models, const std::string& base) {
  Json merge{{"method", method.name}, {"base_model", base}, {"models", Json::array()}, {"parameters", Json::object()}};
  if (method.base != Method::Base::kOrdinary) merge["models"].push_back({{"model", base}, {"parameters", Json::object()}});
  const auto count = std::min(models.size(), method.max_inputs);
  for (std::size_t i = 0; i < count; ++i) merge["models"].push_back({{"model", models[i]}, {"parameters", Json::object()}});
  for (const auto& parameter : method.parameters) {
    if (parameter.fallback) continue;
    if (parameter.scope == Parameter::Scope::kShared) {
      merge["parameters"][std::string(parameter.name)] = 0.5;
    } else {
      for (auto& model : merge["models"]) model["parameters"][std::string(parameter.name)] = 0.5;
    }
  }
  return merge;
}

bool needs_no_files(const Method* method) { return method->statistics == Method::Statistics::kNone; }

}  // namespace

TEST_CASE("T1: tensors that no architecture table knows are merged, not dropped", "[merging][law]") {
  const test::TemporaryFolder folder;
  auto tensors = test::llama_tensors(2, 13, 1);
  for (const auto* layer : {"model.layers.0.", "model.layers.1."}) {
    for (const auto* rest : {"self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.q_proj.bias", "self_attn.v_proj.bias"}) {
      tensors.push_back({layer + std::string(rest), {4}, DType::kF32, 1});
    }
  }
  test::make_checkpoint(folder / "base", test::llama_config(2, 13), tensors);
  const io::CheckpointFolder base(folder / "base");
  for (const auto* method : methods()) {
    if (!needs_no_files(method)) continue;
    INFO(method->name);
    // The model with itself, as often as the method takes.
    const auto result = merged(folder.path(), recipe_for(*method, {"base", "base", "base"}, "base"));
    CHECK(names(result) == names(base));
    CHECK(total_bytes(result) == total_bytes(base));
    if (method->name == "passthrough" || method->name == "uniform_soup" || method->base == Method::Base::kRequired) {
      for (const auto* tensor : base.tensors()) CHECK((test::values_of(*result.find(tensor->name)) == test::values_of(*tensor)));
    }
  }
}

TEST_CASE("T2: tied, tied with a stored copy, and untied heads", "[merging][law]") {
  const test::TemporaryFolder folder;
  const auto with_head = test::llama_tensors(1, 13, 1);
  const std::vector<MadeTensor> without_head(with_head.begin(), with_head.end() - 1);
  test::make_checkpoint(folder / "tied", test::llama_config(1, 13, true), without_head);
  {  // tied in the config, and the head stored as well: the embedding's values
    auto tensors = without_head;
    test::make_checkpoint(folder / "copy", test::llama_config(1, 13, true), tensors);
    const io::CheckpointFolder plain(folder / "copy");
    std::vector<io::TensorView> views;
    for (const auto* tensor : plain.tensors()) views.push_back(*tensor);
    auto head = *plain.find("model.embed_tokens.weight");
    head.name = "lm_head.weight";
    views.push_back(head);
    io::write_safetensors(folder / "with-copy.safetensors", views);
  }
  fs::rename(folder / "with-copy.safetensors", folder / "copy/model.safetensors");
  test::make_checkpoint(folder / "untied", test::llama_config(1, 13, false), test::llama_tensors(1, 13, 2));
  const auto linear = [](const char* a, const char* b) {
    return Json{{"method", "linear"}, {"models", {{{"model", a}, {"parameters", {{"weight", 0.5}}}}, {{"model", b}, {"parameters", {{"weight", 0.5}}}}}}};
  };
  const io::CheckpointFolder tied(folder / "tied");
  {
    const auto result = merged(folder.path(), linear("tied", "copy"));
    CHECK(result.find("lm_head.weight") == nullptr);
    CHECK(total_bytes(result) == total_bytes(tied));
    CHECK(result.config()["tie_word_embeddings"] == true);
  }
  {
    const auto result = merged(folder.path(), linear("tied", "untied"));
    CHECK(result.config()["tie_word_embeddings"] == false);
    REQUIRE(result.find("lm_head.weight") != nullptr);
    const io::CheckpointFolder untied(folder / "untied");
    CHECK(total_bytes(result) == total_bytes(untied));
    const auto ours = test::values_of(*result.find("lm_head.weight"));
    const auto a = test::values_of(*tied.find("model.embed_tokens.weight")), b = test::values_of(*untied.find("lm_head.weight"));
    for (std::size_t i = 0; i < ours.size(); ++i) CHECK(ours[i] == Approx(0.5 * a[i] + 0.5 * b[i]).margin(1e-7));
  }
  // A head that the config ties but that differs is not guessed about.
  test::make_checkpoint(folder / "torn", test::llama_config(1, 13, true), with_head);
  CHECK_THAT(test::user_error([&] { plan_of(folder.path(), linear("tied", "torn")); }), Contains("lm_head.weight") && Contains("untie"));
}

TEST_CASE("T3: an index that lists the aliases of a shared tensor", "[merging][law]") {
  for (const bool gated : {false, true}) {
    const test::TemporaryFolder folder;
    std::vector<MadeTensor> tensors{{"shared.weight", {13, 8}}, {"encoder.final_layer_norm.weight", {8}}, {"decoder.final_layer_norm.weight", {8}}};
    for (const auto* stack : {"encoder.block.0.layer.1.", "decoder.block.0.layer.2."}) {
      const std::vector<std::string> linears = gated ? std::vector<std::string>{"wi_0", "wi_1", "wo"} : std::vector<std::string>{"wi", "wo"};
      for (const auto& name : linears) tensors.push_back({stack + std::string("DenseReluDense.") + name + ".weight", {8, 8}});
    }
    const Json config{{"model_type", "t5"}, {"num_layers", 1}, {"num_decoder_layers", 1}, {"vocab_size", 13}};
    for (const auto* model : {"base", "a"}) {
      for (auto& tensor : tensors) tensor.seed = model == std::string("base") ? 1 : 2;
      test::make_checkpoint(folder / model, config, tensors, 2);
      auto index = io::read_json(folder / model / "model.safetensors.index.json");
      index["weight_map"]["encoder.embed_tokens.weight"] = index["weight_map"]["shared.weight"];
      index["weight_map"]["decoder.embed_tokens.weight"] = index["weight_map"]["shared.weight"];
      io::write_json(folder / model / "model.safetensors.index.json", index);
    }
    for (const auto* method : {"linear", "ties"}) {
      Json merge{{"method", method}, {"models", {{{"model", "a"}, {"parameters", {{"weight", 1.0}}}}}}, {"base_model", "base"}};
      if (method == std::string("linear")) merge["models"].push_back({{"model", "base"}, {"parameters", {{"weight", 1.0}}}});
      const auto result = merged(folder.path(), merge);
      CHECK(result.tensors().size() == tensors.size());
      CHECK(result.find("encoder.embed_tokens.weight") == nullptr);
      CHECK_FALSE(result.config().contains("tie_word_embeddings"));
    }
  }
}

TEST_CASE("T8: the type that is planned is written, within one unit of a float64 reference", "[merging][law]") {
  const test::TemporaryFolder folder;
  const std::map<std::string, DType> models{{"f16", DType::kF16}, {"bf16", DType::kBF16}, {"f32", DType::kF32}};
  std::uint64_t seed = 1;
  for (const auto& [name, dtype] : models) test::make_checkpoint(folder / name, test::llama_config(1, 13), test::llama_tensors(1, 13, seed++, dtype));
  for (const auto* method : methods()) {
    if (!needs_no_files(method)) continue;
    for (const char* dtype : {"", "float32", "bfloat16", "float16"}) {
      INFO(method->name << " " << dtype);
      auto merge = recipe_for(*method, {"f16", "bf16", "f32"}, "f16");
      if (method->base != Method::Base::kOrdinary) merge = recipe_for(*method, {"bf16", "f32"}, "f16");
      if (*dtype != '\0') merge["out_dtype"] = dtype;
      const auto plan = plan_of(folder.path(), merge);
      execute(plan, {.out = folder / "out", .overwrite = true});
      const io::CheckpointFolder result(folder / "out");
      for (const auto& tensor : plan.tensors) {
        REQUIRE(result.find(tensor.name) != nullptr);
        CHECK(result.find(tensor.name)->dtype == tensor.dtype);
        if (*dtype != '\0') CHECK(tensor.dtype == *parse_torch_dtype(dtype));
      }
      const auto* tensor = result.find("model.norm.weight");
      CHECK(result.config()["torch_dtype"] == torch_dtype_name(tensor->dtype));
      if (method->name != "linear") continue;
      std::vector<double> expected(8);
      for (const auto& model : {"f16", "bf16", "f32"}) {
        const auto values = test::values_of(*io::CheckpointFolder(folder / model).find("model.norm.weight"));
        for (std::size_t i = 0; i < 8; ++i) expected[i] += values[i] / 3.0;
      }
      const auto ours = test::values_of(*tensor);
      const double unit = tensor->dtype == DType::kBF16 ? 1.0 / 128 : tensor->dtype == DType::kF16 ? 1.0 / 1024 : 1.0 / (1 << 22);
      for (std::size_t i = 0; i < 8; ++i) CHECK(ours[i] == Approx(expected[i]).epsilon(unit).margin(1e-7));
    }
  }
}

TEST_CASE("T11: twenty merges of eight models are one file", "[merging][law]") {
  const test::TemporaryFolder folder;
  Json merge{{"method", "linear"}, {"models", Json::array()}};
  for (int m = 0; m < 8; ++m) {
    const auto name = "m" + std::to_string(m);
    test::make_checkpoint(folder / name, test::llama_config(3, 40), test::llama_tensors(3, 40, static_cast<std::uint64_t>(m)), m % 2 == 0 ? 1 : 3);
    merge["models"].push_back({{"model", name}, {"parameters", {{"weight", 0.1 + m}}}});
  }
  std::string first;
  for (std::size_t run = 0; run < 20; ++run) {
    merged(folder.path(), merge, 1 + run % 5);
    const auto hash = io::sha256_file(folder / "out/model.safetensors");
    if (run == 0) first = hash;
    CHECK(hash == first);
  }
}

TEST_CASE("T13: files beside the weights are copied and listed", "[merging][law]") {
  const test::TemporaryFolder folder;
  for (const auto* model : {"a", "b"}) {
    test::make_checkpoint(folder / model, test::llama_config(1, 13), test::llama_tensors(1, 13, 1));
    test::write_text(folder / model / "modeling_mine.py", std::string("# ") + model);
  }
  const std::vector<std::string> sidecars{"1_Pooling/config.json", "chat_template.jinja", "generation_config.json",
                                          "modeling_mine.py", "modules.json", "spiece.model", "tokenizer.json", "vocab.json"};
  for (const auto& name : sidecars) test::write_text(folder / "a" / name, "{\"of\": \"" + name + "\"}");
  for (const auto* name : {"optimizer.pt", "training_args.bin", "README.md", "model.gguf", "old.safetensors"}) test::write_text(folder / "a" / name, "x");
  merged(folder.path(), {{"method", "uniform_soup"}, {"models", {{{"model", "a"}}, {{"model", "b"}}}}});
  for (const auto& name : sidecars) CHECK(io::read_file(folder / "out" / name) == io::read_file(folder / "a" / name));
  for (const auto* name : {"optimizer.pt", "training_args.bin", "model.gguf", "old.safetensors"}) CHECK_FALSE(fs::exists(folder / "out" / name));
  const auto listed = io::read_file(folder / "out/manifest.json");
  for (const auto& name : sidecars) CHECK_THAT(listed, Contains(name));
}

TEST_CASE("slices cut and repeat layers, and config.json follows", "[merging][law]") {
  const test::TemporaryFolder folder;
  auto config = test::llama_config(4, 13);
  config["layer_types"] = {"a", "b", "c", "d"};
  test::make_checkpoint(folder / "m", config, test::llama_tensors(4, 13, 1));
  const io::CheckpointFolder whole(folder / "m");
  const auto slices = [](std::vector<std::pair<int, int>> ranges) {
    Json merge{{"method", "passthrough"}, {"slices", Json::array()}};
    for (const auto& [first, end] : ranges) merge["slices"].push_back({{"sources", {{{"model", "m"}, {"layer_range", {first, end}}}}}});
    return merge;
  };
  const auto same = [](const io::TensorView* a, const io::TensorView* b) { return a != nullptr && b != nullptr && std::ranges::equal(a->bytes, b->bytes); };
  {  // PASS-1, PASS-2
    const auto result = merged(folder.path(), slices({{0, 2}, {2, 4}}));
    CHECK(names(result) == names(whole));
    for (const auto* tensor : whole.tensors()) CHECK(same(result.find(tensor->name), tensor));
  }
  {  // PASS-3: depth up-scaling
    const auto result = merged(folder.path(), slices({{0, 3}, {1, 4}}));
    CHECK(result.config()["num_hidden_layers"] == 6);
    CHECK(result.config()["layer_types"] == Json({"a", "b", "c", "b", "c", "d"}));
    const std::vector<int> from{0, 1, 2, 1, 2, 3};
    for (std::size_t i = 0; i < from.size(); ++i) {
      CHECK(same(result.find(fmt::format("model.layers.{}.mlp.up_proj.weight", i)), whole.find(fmt::format("model.layers.{}.mlp.up_proj.weight", from[i]))));
    }
  }
  CHECK_THAT(test::user_error([&] { plan_of(folder.path(), slices({{0, 5}})); }), Contains("[0, 5]") && Contains("4 layers"));
  CHECK_THAT(test::user_error([&] { plan_of(folder.path(), slices({{3, 1}})); }), Contains("runs backwards"));
  CHECK_THAT(fmt::format("{}", fmt::join(plan_of(folder.path(), slices({{0, 0}, {0, 4}})).warnings, " ")), Contains("no layer at all"));
}

TEST_CASE("filters of a source name its own layers", "[merging][law]") {
  const test::TemporaryFolder folder;
  for (const auto* model : {"a", "b"}) test::make_checkpoint(folder / model, test::llama_config(4, 13), test::llama_tensors(4, 13, *model == 'a' ? 1 : 2));
  const auto weight = Json{{{"filter", "layers.3"}, {"value", 3.0}}, {{"value", 1.0}}};
  const Json merge{{"method", "linear"},
                   {"slices", {{{"sources", {{{"model", "a"}, {"layer_range", {2, 4}}, {"parameters", {{"weight", weight}}}},
                                             {{"model", "b"}, {"layer_range", {0, 2}}, {"parameters", {{"weight", 1.0}}}}}}}}}};
  const auto plan = plan_of(folder.path(), merge);
  for (const auto& tensor : plan.tensors) {
    INFO(tensor.name);
    CHECK(tensor.context.inputs[0].parameters["weight"] == (tensor.name.find("layers.1.") != std::string::npos ? 3.0 : 1.0));
  }
}

TEST_CASE("a chat template is chosen, not ignored", "[merging][law]") {
  const test::TemporaryFolder folder;
  for (const auto* model : {"a", "b", "c"}) test::make_checkpoint(folder / model, test::llama_config(1, 13), test::llama_tensors(1, 13, 1));
  test::write_text(folder / "a/tokenizer_config.json", R"({"chat_template": "{{ one }}", "x": 1})");
  test::write_text(folder / "b/chat_template.jinja", "{{ two }}");
  test::write_text(folder / "c/chat_template.jinja", "{{ two }}");
  Json merge{{"method", "uniform_soup"}, {"models", {{{"model", "a"}}, {{"model", "b"}}, {{"model", "c"}}}}};
  const auto written = [&](const char* choice) {
    merge["chat_template"] = choice;
    merged(folder.path(), merge);
    CHECK(io::read_json(folder / "out/tokenizer_config.json") == Json({{"x", 1}}));
    return io::read_file(folder / "out/chat_template.jinja");
  };
  CHECK(written("auto") == "{{ two }}");
  CHECK(written("a") == "{{ one }}");
  CHECK(written("{{ mine }}") == "{{ mine }}");
  merge["chat_template"] = "chatml";
  CHECK_THAT(test::user_error([&] { plan_of(folder.path(), merge); }), Contains("chat_template") && Contains("\"auto\""));
}

TEST_CASE("the same model twice is two inputs", "[merging][law]") {  // DUP-1, DUP-2
  const test::TemporaryFolder folder;
  test::make_checkpoint(folder / "m", test::llama_config(2, 13), test::llama_tensors(2, 13, 1));
  const io::CheckpointFolder model(folder / "m");
  Json merge{{"method", "linear"}, {"parameters", {{"normalize", false}}},
             {"models", {{{"model", "m"}, {"parameters", {{"weight", 2.0}}}}, {{"model", "m"}, {"parameters", {{"weight", 0.5}}}}}}};
  const auto result = merged(folder.path(), merge);
  for (const auto* tensor : model.tensors()) {
    const auto a = test::values_of(*tensor), b = test::values_of(*result.find(tensor->name));
    for (std::size_t i = 0; i < a.size(); ++i) CHECK(b[i] == Approx(2.5 * a[i]).margin(1e-7));
  }
  // One layer with another of the same model.
  const auto mixed = merged(folder.path(), {{"method", "linear"}, {"slices", {{{"sources",
      {{{"model", "m"}, {"layer_range", {0, 1}}, {"parameters", {{"weight", 1.0}}}},
       {{"model", "m"}, {"layer_range", {1, 2}}, {"parameters", {{"weight", 1.0}}}}}}}}}});
  const auto a = test::values_of(*model.find("model.layers.0.mlp.up_proj.weight"));
  const auto b = test::values_of(*model.find("model.layers.1.mlp.up_proj.weight"));
  const auto ours = test::values_of(*mixed.find("model.layers.0.mlp.up_proj.weight"));
  for (std::size_t i = 0; i < a.size(); ++i) CHECK(ours[i] == Approx(0.5 * (a[i] + b[i])).margin(1e-7));
}

TEST_CASE("buffers are copied, never computed with", "[merging][law]") {
  const test::TemporaryFolder folder;
  auto tensors = test::llama_tensors(1, 13, 1);
  tensors.push_back({"model.embeddings.position_ids", {1, 600}, DType::kI64, 5});
  test::make_checkpoint(folder / "a", test::llama_config(1, 13), tensors);
  for (auto& tensor : tensors) tensor.seed = tensor.name.ends_with("position_ids") ? 5 : 2;
  test::make_checkpoint(folder / "b", test::llama_config(1, 13), tensors);
  const Json merge{{"method", "slerp"}, {"models", {{{"model", "a"}}, {{"model", "b"}}}}, {"base_model", "a"}, {"parameters", {{"t", 0.35}}}};
  const auto result = merged(folder.path(), merge);
  CHECK(std::ranges::equal(result.find("model.embeddings.position_ids")->bytes,
                           io::CheckpointFolder(folder / "a").find("model.embeddings.position_ids")->bytes));
  tensors.back().seed = 6;
  test::make_checkpoint(folder / "b", test::llama_config(1, 13), tensors);
  CHECK_THAT(test::user_error([&] { plan_of(folder.path(), merge); }), Contains("position_ids") && Contains("\"buffers\""));
}

TEST_CASE("tensors that only some models have", "[merging][law]") {
  const test::TemporaryFolder folder;
  auto tensors = test::llama_tensors(1, 13, 1);
  test::make_checkpoint(folder / "a", test::llama_config(1, 13), tensors);
  tensors.push_back({"score.weight", {2, 8}, DType::kF32, 2});
  test::make_checkpoint(folder / "b", test::llama_config(1, 13), tensors);
  Json merge{{"method", "linear"}, {"parameters", {{"weight", 1.0}}}, {"models", {{{"model", "a"}}, {{"model", "b"}}}}};
  CHECK_THAT(test::user_error([&] { plan_of(folder.path(), merge); }), Contains("\"score.weight\" is not in a") && Contains("\"missing\""));
  merge["missing"] = "available";
  const auto result = merged(folder.path(), merge);
  CHECK(test::values_of(*result.find("score.weight")) == test::values_of(*io::CheckpointFolder(folder / "b").find("score.weight")));
  merge["missing"] = "base";
  CHECK(merged(folder.path(), merge).find("score.weight") == nullptr);
}

}  // namespace mergex::merging
