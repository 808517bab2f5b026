#include "merging/adapter_source.h"

#include <fmt/format.h>

#include <cmath>
#include <thread>

#include "core/random.h"
#include "support/adapters.h"
#include "support/catch.h"
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
