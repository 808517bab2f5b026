#include "merging/merge_adapters.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <numbers>

#include "io/atomic_file.h"
#include "merging/adapter_source.h"
#include "merging/low_rank.h"
#include "support/adapters.h"
#include "support/catch.h"
#include "support/paths.h"

using namespace mergex;
using io::AdapterFolder;
using io::CheckpointFolder;
using io::Json;
using merging::AdapterInput;
using merging::AppliedAdapter;
using merging::MergeAdaptersOptions;
using test::random_values;
namespace fs = std::filesystem;

namespace {

constexpr std::int64_t kAnyRank = 1000;

std::shared_ptr<AdapterFolder> open_adapter(const fs::path& folder) { return std::make_shared<AdapterFolder>(folder); }
std::shared_ptr<CheckpointFolder> open_base(const fs::path& folder) { return std::make_shared<CheckpointFolder>(folder); }

/// An adapter with the mode's parameters: weight as given, the others as they are by default.
AdapterInput input(const merging::AdapterMode& mode, const fs::path& folder, double weight) {
  AdapterInput result{folder.filename().string(), open_adapter(folder), {}};
  for (const auto& p : mode.parameters) {
    if (p.scope == merging::Parameter::Scope::kInput) {
      result.parameters.set(p.name, p.name == "weight" ? weight : p.fallback.value());
    }
  }
  return result;
}

MergeAdaptersOptions options(const std::string& mode, std::int64_t rank = 0) {
  MergeAdaptersOptions result{.mode = merging::find_adapter_mode(mode, "test"), .rank = rank};
  for (const auto& p : result.mode.parameters) {
    if (p.scope == merging::Parameter::Scope::kShared) result.shared.set(p.name, p.fallback.value());
  }
  return result;
}

struct Weighted {
  fs::path adapter;
  double weight;
};

std::vector<merging::MergedModule> merge(const std::vector<Weighted>& adapters, const MergeAdaptersOptions& o,
                                         const fs::path& out) {
  std::vector<AdapterInput> inputs;
  for (const auto& [folder, weight] : adapters) inputs.push_back(input(o.mode, folder, weight));
  return merging::merge_adapters(inputs, o, out);
}

std::string merge_error(const std::vector<Weighted>& adapters, const MergeAdaptersOptions& o, const fs::path& out) {
  const auto message = test::user_error([&] { merge(adapters, o, out); });
  CHECK(message.find('\n') == std::string::npos);
  CHECK_FALSE(fs::exists(out));
  CHECK_FALSE(fs::exists(out.string() + ".partial"));
  return message;
}

using Deltas = std::map<std::string, std::vector<double>>;

/// What an adapter changes in its base, for tensors that the base has. Absolute values where `whole`.
Deltas deltas_of(const fs::path& adapter, const std::shared_ptr<CheckpointFolder>& base) {
  const AppliedAdapter model(open_adapter(adapter), base);
  Deltas result;
  for (const auto& [name, change] : model.changes()) {
    const auto size = change.base->num_elements();
    REQUIRE(change.shape == change.base->shape);
    auto values = test::read_all<double>(*model.source(name), size);
    const auto before = test::read_all<double>(merging::StoredTensor(*change.base), size);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] -= before[i];
    result[name] = std::move(values);
  }
  return result;
}

double largest(const std::vector<double>& values) {
  double result = 0.0;
  for (const double value : values) result = std::max(result, std::abs(value));
  return result;
}

/// got = sum of weights * deltas, up to the rounding of float32 factors.
void require_sum(const Deltas& got, const std::vector<std::pair<Deltas, double>>& terms) {
  Deltas expected;
  std::map<std::string, double> scale;
  for (const auto& [deltas, weight] : terms) {
    for (const auto& [name, values] : deltas) {
      auto& sum = expected[name];
      sum.resize(values.size(), 0.0);
      for (std::size_t i = 0; i < values.size(); ++i) sum[i] += weight * values[i];
      scale[name] = std::max(scale[name], std::abs(weight) * largest(values));
    }
  }
  for (const auto& [name, values] : expected) {
    INFO(name);
    const auto found = got.find(name);
    REQUIRE(found != got.end());
    double worst = 0.0;
    for (std::size_t i = 0; i < values.size(); ++i) worst = std::max(worst, std::abs(found->second[i] - values[i]));
    CHECK(worst <= 2e-6 * scale[name]);
  }
  CHECK(got.size() == expected.size());
}

const char* const kCases[] = {"plain",     "bfloat16",        "patterns_rslora", "bias_all", "bias_lora_only", "lora_bias",
                              "embedding", "modules_to_save", "conv1d",          "dora"};
const char* const kModes[] = {"cat", "svd", "task_arithmetic_svd", "ties_svd", "dare_linear_svd", "sce_svd"};

fs::path golden(const std::string& name) { return *test::golden_folder("adapters") / name; }
fs::path base_of(const std::string& name) { return golden(name.starts_with("conv1d") ? "base_gpt2" : "base_llama"); }

/// Singular vectors that need no SVD: column k of the orthonormal cosine transform of size n.
double cosine(std::int64_t n, std::int64_t row, std::int64_t k) {
  const auto size = static_cast<double>(n);
  const double scale = std::sqrt((k == 0 ? 1.0 : 2.0) / size);
  return scale * std::cos(std::numbers::pi * (static_cast<double>(row) + 0.5) * static_cast<double>(k) / size);
}

}  // namespace

// LORA-1
TEST_CASE("one adapter with weight 1 stays what it is in every mode", "[merging][law]") {
  if (!test::golden_folder("adapters")) return;
  const std::string name = GENERATE(from_range(std::begin(kCases), std::end(kCases)));
  const std::string mode = GENERATE(from_range(std::begin(kModes), std::end(kModes)));
  if (name == "dora" && mode != "cat" && mode != "svd") return;  // refused, below
  CAPTURE(name, mode);
  test::TemporaryFolder temporary;
  const auto base = open_base(base_of(name));
  auto o = options(mode, kAnyRank);
  o.base = base;
  const auto modules = merge({{golden(name), 1.0}}, o, temporary / "out");
  for (const auto& module : modules) CHECK(module.relative_error < 1e-6);
  require_sum(deltas_of(temporary / "out", base), {{deltas_of(golden(name), base), 1.0}});
}

// LORA-2
TEST_CASE("weight -1 negates an adapter, weights 1 and -1 cancel", "[merging][law]") {
  if (!test::golden_folder("adapters")) return;
  const std::string name = GENERATE(from_range(std::begin(kCases), std::end(kCases)));
  if (name == "dora") return;  // refused, below
  const std::string mode = GENERATE("cat", "svd", "task_arithmetic_svd");
  CAPTURE(name, mode);
  test::TemporaryFolder temporary;
  const auto base = open_base(base_of(name));
  auto o = options(mode, kAnyRank);
  o.base = base;
  const auto delta = deltas_of(golden(name), base);
  merge({{golden(name), -1.0}}, o, temporary / "negated");
  require_sum(deltas_of(temporary / "negated", base), {{delta, -1.0}});

  const auto modules = merge({{golden(name), 1.0}, {golden(name), -1.0}}, o, temporary / "nothing");
  require_sum(deltas_of(temporary / "nothing", base), {{delta, 1.0}, {delta, -1.0}});
  for (const auto& module : modules) {
    CHECK(module.norm == 0.0);
    CHECK(module.relative_error == 0.0);
  }
}

// LORA-3
TEST_CASE("cat is task arithmetic on the models with their adapters", "[merging][law]") {
  if (!test::golden_folder("adapters")) return;
  test::TemporaryFolder temporary;
  const auto base = open_base(golden("base_llama"));
  std::vector<Weighted> adapters;
  std::vector<std::pair<Deltas, double>> terms;
  double weight = 0.7;
  for (const char* name : {"plain", "bfloat16", "patterns_rslora", "bias_all", "bias_lora_only", "embedding", "modules_to_save"}) {
    adapters.push_back({golden(name), weight});
    terms.push_back({deltas_of(golden(name), base), weight});
    weight = -1.1 * weight + 0.2;
  }
  for (const char* mode : {"cat", "svd", "task_arithmetic_svd"}) {
    CAPTURE(mode);
    auto o = options(mode, kAnyRank);
    o.base = base;
    merge(adapters, o, temporary / mode);
    require_sum(deltas_of(temporary / mode, base), terms);
  }
}

TEST_CASE("whole tensors need no base where weights sum to 1", "[merging][law]") {
  if (!test::golden_folder("adapters")) return;
  test::TemporaryFolder temporary;
  const auto base = open_base(golden("base_llama"));
  const auto saved = golden("modules_to_save");
  merge({{saved, 0.25}, {saved, 0.75}}, options("cat"), temporary / "out");
  require_sum(deltas_of(temporary / "out", base), {{deltas_of(saved, base), 1.0}});
  const auto message = merge_error({{saved, 0.5}, {golden("plain"), 0.5}}, options("cat"), temporary / "none");
  CHECK(message.ends_with("tensor \"lm_head.weight\" is stored whole, and its change is counted from the base; give the base, or "
                          "weights that sum to 1 in mode cat or svd"));
}

TEST_CASE("svd cuts the least that its rank allows", "[merging][law]") {
  test::TemporaryFolder temporary;
  // A delta with singular values 5, 4, 3, 2, 1 along known vectors, from two adapters.
  const std::int64_t in = 9, out = 12;
  const double values[] = {5, 4, 3, 2, 1};
  const std::string module = "layers.0.mlp.up_proj";
  std::int64_t k = 0;
  for (const auto& [name, rank] : {std::pair{"a", 2}, std::pair{"b", 3}}) {
    test::Values a{{rank, in}, {}}, b{{out, rank}, std::vector<float>(static_cast<std::size_t>(out * rank))};
    for (int r = 0; r < rank; ++r, ++k) {
      for (std::int64_t i = 0; i < in; ++i) a.values.push_back(static_cast<float>(cosine(in, i, k)));
      for (std::int64_t o = 0; o < out; ++o) {
        b.values[static_cast<std::size_t>(o * rank + r)] = static_cast<float>(values[k] * cosine(out, o, k));
      }
    }
    test::write_adapter_folder(temporary / name, {{"peft_type", "LORA"}, {"r", rank}, {"lora_alpha", rank}},
                               {{module + ".lora_A.weight", a}, {module + ".lora_B.weight", b}});
  }
  const std::string mode = GENERATE("svd", "task_arithmetic_svd");
  for (std::int64_t rank = 1; rank <= 7; ++rank) {
    CAPTURE(mode, rank);
    const auto merged = merge({{temporary / "a", 1.0}, {temporary / "b", 1.0}}, options(mode, rank),
                              temporary / fmt::format("{}-{}", mode, rank));
    REQUIRE(merged.size() == 1);
    double lost = 0.0;
    for (std::int64_t i = rank; i < 5; ++i) lost += values[i] * values[i];
    CHECK(merged[0].norm == Approx(std::sqrt(55.0)).epsilon(1e-6));
    CHECK(merged[0].relative_error == Approx(std::sqrt(lost / 55.0)).margin(1e-6));
    CHECK(merged[0].rank == (mode == "svd" ? std::min<std::int64_t>(rank, 5) : rank));
  }
}

TEST_CASE("a large matrix is cut where its singular values say", "[merging][law]") {
  // More than 256 on the short side: subspace iteration. The spectrum falls slowly, or not at all.
  const bool flat = GENERATE(false, true);
  const bool tall = GENERATE(false, true);
  const std::int64_t num_rows = tall ? 420 : 300, num_columns = tall ? 300 : 420, terms = 300;
  CAPTURE(flat, tall);
  std::vector<double> spectrum;
  for (std::int64_t k = 0; k < terms; ++k) spectrum.push_back(flat ? 1.0 : std::pow(0.97, static_cast<double>(k)));
  std::vector<float> matrix(static_cast<std::size_t>(num_rows * num_columns), 0.0f);
  std::vector<double> row(static_cast<std::size_t>(num_columns));
  for (std::int64_t r = 0; r < num_rows; ++r) {
    std::ranges::fill(row, 0.0);
    for (std::int64_t k = 0; k < terms; ++k) {
      const double left = spectrum[static_cast<std::size_t>(k)] * cosine(num_rows, r, k);
      for (std::int64_t c = 0; c < num_columns; ++c) row[static_cast<std::size_t>(c)] += left * cosine(num_columns, c, k);
    }
    std::ranges::copy(row, matrix.begin() + r * num_columns);
  }
  double total = 0.0;
  for (const double value : spectrum) total += value * value;
  for (const std::int64_t rank : {1, 16, 299, 300, 5000}) {
    CAPTURE(rank);
    double lost = 0.0;
    for (std::int64_t k = rank; k < terms; ++k) lost += spectrum[static_cast<std::size_t>(k)] * spectrum[static_cast<std::size_t>(k)];
    const auto best = merging::best_matrix(matrix, num_rows, num_columns, rank);
    CHECK(best.rank == std::min<std::int64_t>(rank, 300));
    CHECK(best.norm == Approx(std::sqrt(total)).epsilon(1e-6));
    CHECK(best.relative_error == Approx(std::sqrt(lost / total)).epsilon(1e-4).margin(2e-6));
  }
}

TEST_CASE("adapters merge to the same bytes every time", "[merging][law]") {
  if (!test::golden_folder("adapters")) return;
  const std::string mode = GENERATE("cat", "svd", "dare_ties_svd");
  CAPTURE(mode);
  test::TemporaryFolder temporary;
  for (const char* out : {"first", "second"}) {
    merge({{golden("plain"), 0.5}, {golden("patterns_rslora"), -0.25}}, options(mode), temporary / out);
  }
  for (const char* file : {"adapter_config.json", "adapter_model.safetensors"}) {
    CHECK(io::read_file(temporary / "first" / file) == io::read_file(temporary / "second" / file));
  }
  CHECK(std::distance(fs::directory_iterator(temporary / "first"), fs::directory_iterator()) == 2);
}

TEST_CASE("what adapters cannot become is said in one line", "[merging]") {
  if (!test::golden_folder("adapters")) return;
  test::TemporaryFolder temporary;
  const auto out = temporary / "out";
  const auto plain = golden("plain"), dora = golden("dora");

  CHECK(merge_error({{plain, 0.0}}, options("cat"), out) ==
        "every adapter has weight 0, so that nothing would be left; give at least one another weight");
  auto ties = options("ties_svd");
  auto nothing = input(ties.mode, plain, 1.0);
  nothing.parameters.set("density", 0.0);
  CHECK(test::user_error([&] { merging::merge_adapters(std::array{nothing}, ties, out); }) ==
        "plain: density is 0, so that nothing of the adapter would be kept; expected more than 0 and at most 1");
  for (const auto& [adapters, mode] :
       {std::pair{std::vector<Weighted>{{dora, -1.0}}, "cat"}, {{{dora, 1.0}, {dora, -1.0}}, "svd"}, {{{dora, 1.0}}, "ties_svd"}}) {
    const auto message = merge_error(adapters, options(mode), out);
    CHECK(message.starts_with("dora: is a DoRA adapter, whose change of weights is no product of two factors"));
    CHECK(message.ends_with("merge the models with their adapters instead (base+adapter)"));
  }
  for (const auto& [name, in] : {std::pair<const char*, std::int64_t>{"a", 4}, {"b", 5}}) {
    test::write_adapter_folder(temporary / name, {{"peft_type", "LORA"}, {"r", 1}, {"lora_alpha", 1}},
                               {{"up.lora_A.weight", random_values({1, in}, 1)}, {"up.lora_B.weight", random_values({3, 1}, 2)}});
  }
  const auto other = merge_error({{temporary / "a", 1.0}, {temporary / "b", 1.0}}, options("cat"), out);
  CHECK(other.find("module \"up\" maps 5 inputs to 3 outputs, but 4 to 3 in ") != std::string::npos);
  CHECK(other.ends_with("; the adapters belong to different bases"));

  test::write_adapter_folder(temporary / "broken", {{"peft_type", "LORA"}, {"r", 1}, {"lora_alpha", 1}},
                             {{"up.lora_A.weight", {{1, 2}, {1.0f, NAN}}}, {"up.lora_B.weight", random_values({3, 1}, 2)}});
  CHECK(merge_error({{temporary / "broken", 1.0}}, options("svd"), out)
            .ends_with("tensor \"base_model.model.up.lora_A.weight\" holds values that are not finite; the adapter is broken, train it "
                       "again"));

  test::write_text(out / "file", "");
  CHECK(test::user_error([&] { merge({{plain, 1.0}}, options("cat"), out); }).ends_with(
      "/out: is there already and not empty; choose another folder or remove it"));

  CHECK(test::user_error([] { merging::find_adapter_mode("linear", "r.json#/mode"); })
            .starts_with("r.json#/mode: got \"linear\", which in PEFT averages A's and B's apart"));
  CHECK(test::user_error([] { merging::find_adapter_mode("ties_sdv", "r.json#/mode"); })
            .starts_with("r.json#/mode: got \"ties_sdv\", no such way to merge adapters; did you mean \"ties_svd\"?"));
}

// For tests/merging/merged_adapters_in_peft.py: adapters and what they should be.
TEST_CASE("adapters for PEFT to load", "[.peft]") {
  const char* folder = std::getenv("MERGEX_ADAPTERS_OUT");
  REQUIRE(folder != nullptr);
  fs::create_directories(folder);
  auto cases = Json::array();
  const auto add = [&](const std::string& name, const std::string& mode, const std::vector<std::pair<std::string, double>>& inputs) {
    auto o = options(mode, kAnyRank);
    const auto base = base_of(inputs.front().first);
    o.base = open_base(base);
    std::vector<Weighted> adapters;
    auto listed = Json::array();
    for (const auto& [adapter, weight] : inputs) {
      adapters.push_back({golden(adapter), weight});
      listed.push_back({{"adapter", golden(adapter).string()}, {"weight", weight}});
    }
    merge(adapters, o, fs::path(folder) / name);
    cases.push_back({{"name", name}, {"base", base.string()}, {"inputs", listed}});
  };
  for (const std::string name : kCases) add("alone_" + name, "cat", {{name, 1.0}});
  for (const std::string mode : {"cat", "svd", "task_arithmetic_svd"}) {
    add("mixed_" + mode, mode, {{"plain", 0.7}, {"patterns_rslora", -0.6}, {"embedding", 0.5}, {"bias_all", 1.3}, {"modules_to_save", 0.4}});
    add("lora_bias_" + mode, mode, {{"lora_bias", 0.5}, {"bias_all", -1.5}});
    add("conv1d_" + mode, mode, {{"conv1d", 0.5}, {"conv1d_unflagged", 2.0}});
  }
  io::write_json(fs::path(folder) / "cases.json", cases);
}
