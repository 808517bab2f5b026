#include "merging/adapter_source.h"

#include <fmt/format.h>

#include <cmath>
#include <thread>

#include "core/random.h"
#include "merging/method.h"
#include "support/adapters.h"
#include "support/catch.h"
#include "support/merging.h"
#include "support/paths.h"

using namespace mergex;
using io::AdapterFolder;
using io::CheckpointFolder;
using io::Json;
using merging::AppliedAdapter;
using test::random_values;
namespace fs = std::filesystem;

namespace {

AppliedAdapter applied(const fs::path& adapter, const fs::path& base,
                       AppliedAdapter::TiedWeights tied = AppliedAdapter::TiedWeights::kRefuse) {
  return AppliedAdapter(std::make_shared<AdapterFolder>(adapter), std::make_shared<CheckpointFolder>(base), tied);
}

/// Largest |got - expected| over the largest |expected|, in float and in double.
struct Errors {
  double in_float = 0.0, in_double = 0.0;
};
Errors errors(const merging::Source& source, const io::TensorView& expected) {
  const auto size = expected.num_elements();
  const auto want = test::read_all<double>(merging::StoredTensor(expected), size);
  const auto narrow = test::read_all<float>(source, size);
  const auto wide = test::read_all<double>(source, size);
  double largest = 0.0;
  Errors worst;
  for (std::size_t i = 0; i < want.size(); ++i) {
    largest = std::max(largest, std::abs(want[i]));
    worst.in_float = std::max(worst.in_float, std::abs(static_cast<double>(narrow[i]) - want[i]));
    worst.in_double = std::max(worst.in_double, std::abs(wide[i] - want[i]));
    CHECK(std::isfinite(narrow[i]));
  }
  return {worst.in_float / largest, worst.in_double / largest};
}

/// Every tensor that the adapter changes, against the merged weights of `expected`, whose names begin with `prefix`.
/// @param float64  the expected weights were computed in float64
void compare(const std::string& id, const AppliedAdapter& model, const io::SafetensorsFile& expected, const std::string& prefix,
             bool float64) {
  Errors worst;
  std::size_t compared = 0;
  for (const auto& tensor : expected.tensors()) {
    if (!tensor.name.starts_with(prefix)) continue;
    const auto name = tensor.name.substr(prefix.size());
    INFO(id << " " << name);
    const auto* change = model.find(name);
    REQUIRE(change != nullptr);
    CHECK(change->shape == tensor.shape);
    CHECK_FALSE(change->description.empty());
    const auto error = errors(*model.source(name), tensor);
    CHECK(error.in_float < 1e-6);
    CHECK(error.in_double < (float64 ? 1e-14 : 1e-6));
    worst = {std::max(worst.in_float, error.in_float), std::max(worst.in_double, error.in_double)};
    ++compared;
  }
  // What the adapter says that it changes and PEFT left as it was: saved copies of the base's tensors.
  std::size_t copies = 0;
  for (const auto& [name, change] : model.changes()) {
    if (expected.find(prefix + name) != nullptr) continue;
    INFO(id << " " << name);
    REQUIRE(change.module == nullptr);
    REQUIRE(change.replaced != nullptr);
    REQUIRE(change.base != nullptr);
    CHECK(std::ranges::equal(change.replaced->bytes, change.base->bytes));
    ++copies;
  }
  CHECK(compared + copies == model.changes().size());
  REQUIRE(compared > 0);
  test::log_golden(id, fmt::format("ok, {} tensors, largest relative error {:.1g} (float32), {:.1g} (float64)", compared,
                                   worst.in_float, worst.in_double));
}

const Json kLlama{{"model_type", "llama"}, {"architectures", {"LlamaForCausalLM"}}, {"tie_word_embeddings", false}};
const Json kLora{{"peft_type", "LORA"}, {"r", 2}, {"lora_alpha", 4}};

Json with(Json json, const std::string& key, Json value) {
  json[key] = std::move(value);
  return json;
}

std::vector<fs::path> sorted_folders(const fs::path& root) {
  std::vector<fs::path> folders;
  for (const auto& entry : fs::directory_iterator(root)) {
    if (entry.is_directory()) folders.push_back(entry.path());
  }
  std::ranges::sort(folders);
  return folders;
}

fs::path base_of(const fs::path& adapter) {
  return adapter / AdapterFolder(adapter).config()["base_model_name_or_path"].get<std::string>();
}

constexpr const char* kModule = "model.layers.0.self_attn.q_proj";

}  // namespace

TEST_CASE("adapters applied to their base give PEFT's merged weights", "[merging][golden]") {
  const auto folder = test::golden_folder("adapters");
  if (!folder) return;
  std::size_t count = 0;
  for (const auto& path : sorted_folders(*folder)) {
    const auto name = path.filename().string();
    if (name.starts_with("base_")) continue;
    compare("adapters/" + name, applied(path, base_of(path)), io::SafetensorsFile::open(path / "expected.safetensors"), "", true);
    ++count;
  }
  CHECK(count >= 15);
}

TEST_CASE("adapters of real architectures give PEFT's merged weights", "[merging][golden]") {
  const auto folder = test::golden_folder("models");
  if (!folder) return;
  std::size_t count = 0;
  for (const auto& path : sorted_folders(*folder)) {
    if (!AdapterFolder::is_adapter(path)) continue;
    compare("models/" + path.filename().string(), applied(path, base_of(path)),
            io::SafetensorsFile::open(path / "expected.safetensors"), "merged.", false);
    ++count;
  }
  CHECK(count >= 1);
}

TEST_CASE("a range of an adapted tensor is that part of the whole", "[merging][law]") {
  const bool dora = GENERATE(false, true);
  const bool transposed = GENERATE(false, true);
  // More columns and rows than a block, odd sizes, one row, one column.
  const auto [in, out] = GENERATE(std::pair<std::int64_t, std::int64_t>{1500, 301}, std::pair<std::int64_t, std::int64_t>{7, 5},
                                  std::pair<std::int64_t, std::int64_t>{1, 530}, std::pair<std::int64_t, std::int64_t>{1031, 1});
  CAPTURE(dora, transposed, in, out);
  test::TemporaryFolder temporary;
  const auto name = std::string(kModule) + ".weight";
  const std::vector shape = transposed ? std::vector{in, out} : std::vector{out, in};
  test::write_checkpoint(temporary / "base", kLlama, {{name, random_values(shape, 1)}});
  test::NamedValues tensors{{std::string(kModule) + ".lora_A.weight", random_values({2, in}, 2)},
                            {std::string(kModule) + ".lora_B.weight", random_values({out, 2}, 3)}};
  if (dora) tensors[std::string(kModule) + ".lora_magnitude_vector"] = random_values({out}, 4);
  test::write_adapter_folder(temporary / "adapter", with(with(kLora, "use_dora", dora), "fan_in_fan_out", transposed), tensors);
  const auto model = applied(temporary / "adapter", temporary / "base");
  const auto size = in * out;
  const auto whole = test::read_all<float>(*model.source(name), size);
  const auto whole_wide = test::read_all<double>(*model.source(name), size);

  const auto source = model.source(name);  // several threads ask a fresh one for ranges
  std::vector<std::thread> threads;
  std::vector<std::size_t> wrong(3, 0);
  for (std::size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      SplitMix64 random(t);
      for (int trial = 0; trial < 40; ++trial) {
        const auto begin = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(size)));
        const auto longest = trial % 2 == 0 ? size - begin : std::min<std::int64_t>(size - begin, 50);
        const auto count = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(longest + 1)));
        std::vector<float> part(static_cast<std::size_t>(count));
        std::vector<double> wide_part(part.size());
        source->read(begin, count, part.data());
        source->read(begin, count, wide_part.data());
        for (std::size_t i = 0; i < part.size(); ++i) {
          const auto at = static_cast<std::size_t>(begin) + i;
          wrong[t] += part[i] != whole[at] || wide_part[i] != whole_wide[at];
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == std::vector<std::size_t>(3, 0));
}

// T14
TEST_CASE("adapters merge as models: weights 1, -1, and both", "[merging][law]") {
  const auto folder = test::golden_folder("adapters");
  if (!folder) return;
  const auto& method = merging::find_method("task_arithmetic", "test");
  for (const char* name : {"plain", "patterns_rslora", "bias_all", "lora_bias", "dora", "conv1d_dora", "embedding_dora"}) {
    const auto path = *folder / name;
    const auto model = applied(path, base_of(path));
    for (const auto& [tensor, change] : model.changes()) {
      CAPTURE(name, tensor);
      const auto size = change.base->num_elements();
      test::InMemory<float> merge;
      merge.base = test::read_all<float>(merging::StoredTensor(*change.base), size);
      const auto adapted = test::read_all<float>(*model.source(tensor), size);
      const auto merged = [&](const std::vector<double>& weights) {
        std::vector<test::Named> parameters;
        for (const double weight : weights) parameters.push_back({{"weight", weight}});
        merge.inputs.assign(weights.size(), adapted);
        merge.context = test::context_for(method, change.shape, weights.size(), parameters);
        return test::merge_tensor(method, merge);
      };
      const auto identity = merged({1.0}), negated = merged({-1.0});
      float scale = 0.0f, difference = 0.0f, reflected = 0.0f;
      for (std::size_t i = 0; i < adapted.size(); ++i) {
        scale = std::max({scale, std::abs(adapted[i]), std::abs(merge.base[i])});
        difference = std::max(difference, std::abs(identity[i] - adapted[i]));
        reflected = std::max(reflected, std::abs(negated[i] + adapted[i] - 2 * merge.base[i]));
      }
      CHECK(difference <= 3e-7f * scale);
      CHECK(reflected <= 6e-7f * scale);
      CHECK(merged({1.0, -1.0}) == merge.base);
    }
  }
}

TEST_CASE("names are found with and without the model's prefix", "[merging]") {
  test::TemporaryFolder temporary;
  const auto adapter = [&](const std::string& module) {
    test::write_adapter_folder(temporary / "adapter", kLora, {{module + ".lora_A.weight", random_values({2, 4}, 1)},
                                                              {module + ".lora_B.weight", random_values({3, 2}, 2)}});
    return applied(temporary / "adapter", temporary / "base");
  };
  test::write_checkpoint(temporary / "base", kLlama, {{"model.layers.0.q_proj.weight", random_values({3, 4}, 3)},
                                                      {"h.0.mlp.weight", random_values({3, 4}, 4)}});
  CHECK(adapter("model.layers.0.q_proj").find("model.layers.0.q_proj.weight") != nullptr);
  CHECK(adapter("layers.0.q_proj").find("model.layers.0.q_proj.weight") != nullptr);
  const auto bare = adapter("transformer.h.0.mlp");
  CHECK(bare.find("h.0.mlp.weight") != nullptr);
  CHECK(bare.find("model.layers.0.q_proj.weight") == nullptr);
  CHECK(bare.changes().size() == 1);
  // What is not changed is read as it is stored.
  CHECK(bare.source("model.layers.0.q_proj.weight")->stored() == bare.base().find("model.layers.0.q_proj.weight"));
  CHECK(bare.source("h.0.mlp.weight")->stored() == nullptr);
  CHECK_THROWS_AS(bare.source("nothing"), std::logic_error);
}

TEST_CASE("an adapter of another base is refused in one line", "[merging]") {
  test::TemporaryFolder temporary;
  const auto base = temporary / "base", folder = temporary / "adapter";
  test::write_checkpoint(base, kLlama, {{"model.layers.0.q_proj.weight", random_values({3, 4}, 3)},
                                        {"model.layers.0.q_proj.bias", random_values({3}, 3)},
                                        {"model.layers.0.o_proj.weight", random_values({3, 4}, 3)},
                                        {"model.norm.weight", random_values({4}, 3)}});
  const auto fault = [&](const Json& config, const std::string& module, std::int64_t out, const test::NamedValues& more = {}) {
    test::NamedValues tensors{{module + ".lora_A.weight", random_values({2, 4}, 1)},
                              {module + ".lora_B.weight", random_values({out, 2}, 2)}};
    tensors.insert(more.begin(), more.end());
    test::write_adapter_folder(folder, config, tensors);
    const auto message = test::user_error([&] { applied(folder, base); });
    CHECK(message.find('\n') == std::string::npos);
    const auto file = (folder / "adapter_model.safetensors").string() + ": ";
    REQUIRE(message.starts_with(file));
    return message.substr(file.size());
  };
  CHECK(fault(kLora, "model.layers.0.q_prj", 3) ==
        "module \"model.layers.0.q_prj\": " + base.string() + " has no tensor \"model.layers.0.q_prj.weight\"; did you mean "
        "\"model.layers.0.q_proj.weight\"?");
  CHECK(fault(kLora, "visual.blocks.3.attn.qkv", 3).ends_with("has no tensor \"visual.blocks.3.attn.qkv.weight\"; the adapter belongs "
                                                             "to another base"));
  CHECK(fault(kLora, "model.layers.0.q_proj", 5) ==
        "module \"model.layers.0.q_proj\": A is [2, 4] and B is [5, 2], which does not fit \"model.layers.0.q_proj.weight\" [3, 4] "
        "of " + base.string() + "; the adapter belongs to another base");
  CHECK(fault(with(kLora, "lora_bias", true), "model.layers.0.o_proj", 3,
              {{"model.layers.0.o_proj.lora_B.bias", random_values({3}, 4)}})
            .find("has a bias of B (lora_bias), but ") != std::string::npos);
  CHECK(fault(with(kLora, "modules_to_save", {"norm"}), "model.layers.0.q_proj", 3, {{"model.norm.weight", random_values({5}, 4)}})
            .starts_with("tensor \"base_model.model.model.norm.weight\" is [5], but [4] in "));
  CHECK(fault(with(kLora, "modules_to_save", {"o_proj"}), "model.layers.0.q_proj", 3,
              {{"model.layers.0.o_proj.weight", random_values({3, 5}, 4)}})
            .find(" is [3, 5], but [3, 4] in ") != std::string::npos);

  // A bias of zeros, which merged adapters have, needs none to be added to.
  test::write_adapter_folder(folder, with(kLora, "lora_bias", true),
                             {{"model.layers.0.o_proj.lora_A.weight", random_values({2, 4}, 1)},
                              {"model.layers.0.o_proj.lora_B.weight", random_values({3, 2}, 1)},
                              {"model.layers.0.o_proj.lora_B.bias", {{3}, {0, 0, 0}}}});
  CHECK(applied(folder, base).changes().size() == 1);
}

TEST_CASE("an adapter of a tied embedding acts on both uses or unties them", "[merging]") {
  using Tied = AppliedAdapter::TiedWeights;
  test::TemporaryFolder temporary;
  const auto base = temporary / "base", folder = temporary / "adapter";
  const std::string embedding = "model.embed_tokens.weight", head = "lm_head.weight";
  test::write_checkpoint(base, with(kLlama, "tie_word_embeddings", true), {{embedding, random_values({6, 4}, 3)}});
  const test::NamedValues on_embedding{{"model.embed_tokens.lora_embedding_A", random_values({2, 6}, 1)},
                                       {"model.embed_tokens.lora_embedding_B", random_values({4, 2}, 2)}};
  const test::NamedValues on_head{{"lm_head.lora_A.weight", random_values({2, 4}, 1)},
                                  {"lm_head.lora_B.weight", random_values({6, 2}, 2)}};
  const auto refused = [&](const Json& config, const test::NamedValues& tensors) {
    test::write_adapter_folder(folder, config, tensors);
    return test::user_error([&] { applied(folder, base); }).find("is embedding and head at once") != std::string::npos;
  };
  const auto stored = random_values({6, 4}, 3).values;
  const auto values = [](const AppliedAdapter& model, const std::string& name) {
    return test::read_all<float>(*model.source(name), 24);
  };

  CHECK(refused(kLora, on_embedding));
  const auto one = applied(folder, base, Tied::kUntie);
  CHECK(one.unties());
  CHECK(one.changes().size() == 2);
  CHECK(values(one, embedding) != stored);
  CHECK(values(one, head) == stored);

  CHECK(refused(kLora, on_head));
  const auto other = applied(folder, base, Tied::kUntie);
  CHECK(other.unties());
  CHECK(other.changes().size() == 1);
  CHECK(values(other, embedding) == stored);
  CHECK(values(other, head) != stored);
  CHECK(other.find(head)->shape == std::vector<std::int64_t>{6, 4});

  // Trained as one, or saved twice with the same values: they stay one.
  auto both = on_embedding;
  both.insert(on_head.begin(), on_head.end());
  CHECK(refused(kLora, both));
  test::write_adapter_folder(folder, with(kLora, "ensure_weight_tying", true), both);
  const auto together = applied(folder, base);
  CHECK_FALSE(together.unties());
  CHECK(together.changes().size() == 1);
  CHECK(values(together, embedding) == values(one, embedding));
  const Json saved = with(kLora, "modules_to_save", {"embed_tokens", "lm_head"});
  CHECK(refused(saved, {{embedding, random_values({8, 4}, 5)}, {head, random_values({8, 4}, 6)}}));
  test::write_adapter_folder(folder, saved, {{embedding, random_values({8, 4}, 5)}, {head, random_values({8, 4}, 5)}});
  const auto resized = applied(folder, base);
  CHECK(resized.changes().size() == 1);
  CHECK(resized.find(embedding)->shape == std::vector<std::int64_t>{8, 4});

  // Other layers, and models without a head, have nothing to decide.
  test::write_checkpoint(base, {{"model_type", "bert"}, {"architectures", {"BertModel"}}}, {{embedding, random_values({6, 4}, 3)}});
  test::write_adapter_folder(folder, kLora, on_embedding);
  CHECK(applied(folder, base).changes().size() == 1);
}
