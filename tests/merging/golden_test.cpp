#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "core/error.h"
#include "io/checkpoint_folder.h"
#include "io/yaml.h"
#include "merging/execute.h"
#include "merging/mergekit_recipe.h"
#include "merging/planner.h"
#include "support/catch.h"
#include "support/paths.h"
#include "text/vocabulary.h"

// mergekit's outputs for 99 of its configurations, through the whole of `mergex merge` from YAML to files on disk.
// Tolerances: tests/golden/merge/NOTES.md.

namespace mergex::merging {
namespace {
namespace fs = std::filesystem;
using io::Json;

// Recipes name their models relative to the folder of the case, as mergekit does.
class WorkingDirectory {
 public:
  explicit WorkingDirectory(const fs::path& path) : before_(fs::current_path()) { fs::current_path(path); }
  ~WorkingDirectory() { fs::current_path(before_); }
  WorkingDirectory(const WorkingDirectory&) = delete;
  WorkingDirectory& operator=(const WorkingDirectory&) = delete;

 private:
  fs::path before_;
};

MergePlan plan_of(const fs::path& recipe, std::uint64_t seed) {
  const auto documents = io::read_yaml(recipe);
  REQUIRE(documents.size() == 1);
  const auto document = std::make_shared<io::JsonDocument>(recipe_from_mergekit(documents[0]));
  io::JsonObject root(document);
  const auto section = read_merge_section(root, RelativeTo::kWorkingDir);
  root.finish();
  return plan_merge(section, seed);
}

std::vector<double> values_of(const io::TensorView& view) {
  std::vector<double> values(static_cast<std::size_t>(view.num_elements()));
  if (view.dtype == io::DType::kI64) {
    std::vector<std::int64_t> integers(values.size());
    std::memcpy(integers.data(), view.bytes.data(), view.bytes.size());
    std::ranges::copy(integers, values.begin());
  } else {
    StoredTensor(view).read(0, view.num_elements(), values.data());
  }
  return values;
}

// Distance of neighbouring numbers of a type at this magnitude.
double ulp_at(double magnitude, io::DType dtype) {
  const int bits = dtype == io::DType::kBF16 ? 8 : dtype == io::DType::kF16 ? 11 : 24;
  const int smallest = dtype == io::DType::kF16 ? -14 : -126;
  return std::ldexp(1.0, std::max(magnitude == 0.0 ? smallest : std::ilogb(magnitude), smallest) - bits + 1);
}

// Largest magnitude among the inputs of each element.
std::vector<double> largest_inputs(const PlannedTensor& tensor, std::size_t count) {
  std::vector<double> largest(count), values(count);
  const auto add = [&](const PlannedTensor::Origin& origin) {
    origin.source->read(0, static_cast<std::int64_t>(count), values.data());
    for (std::size_t i = 0; i < count; ++i) largest[i] = std::max(largest[i], std::abs(values[i]));
  };
  if (tensor.base) add(*tensor.base);
  if (tensor.copied) add(*tensor.copied);
  for (const auto& input : tensor.inputs) add(input);
  return largest;
}

struct Rule {
  double max_error = 0.0;       ///< in units of the tensor's largest golden value (float32), or of input ULP (16 bit)
  double equal_fraction = 0.0;  ///< of all elements of the case
  double outside_fraction = 0.0;  ///< elements that may break `max_error`
};

Rule rule_of(const std::string& name, const Json& recipe, bool is_float32) {
  if (name.starts_with("arcee_fusion")) return {.max_error = is_float32 ? 6e-7 : 1.0, .outside_fraction = 1e-3};
  if (is_float32) return {.max_error = 6e-7};
  if (name.starts_with("passthrough")) return {.equal_fraction = 1.0};
  const bool is_linear = name.starts_with("linear");
  const bool is_float32_math = recipe.contains("dtype") && recipe["dtype"] == "float32";
  if (is_float32_math) return {.max_error = 1.0, .equal_fraction = name == "linear_f32math_bf16" ? 0.98 : 0.999};
  return {.max_error = is_linear || name.starts_with("slerp") ? 1.0 : 3.0,
          .equal_fraction = name == "linear_native_bf16" ? 0.98 : 0.0};
}

// NOTES.md, bit-exact rules.
const std::set<std::string> kBitExact{"linear_weighted_f32", "task_arithmetic_f32", "task_arithmetic_f32math_bf16",
                                      "ties_densities_f32", "ties_f32math_bf16", "breadcrumbs_f32"};

// What upstream's config.json says and is wrong about, or writes in another, equally right way.
bool is_config_comparable(const std::string& name, const std::string& key) {
  if (key == "tie_word_embeddings") return name.find("t5") == std::string::npos;
  return !(key == "dtype" && name.starts_with("linear_mixed"));
}

// Tokens are numbered anew in every run of mergekit: its row for each of our rows. Empty without a vocabulary of its own.
std::vector<std::int64_t> golden_rows(const fs::path& golden_vocabulary, const fs::path& merged) {
  if (!fs::exists(golden_vocabulary)) return {};
  const auto golden = io::read_json(golden_vocabulary);
  const auto ours = text::Vocabulary::read(merged);
  CHECK(ours.tokens().size() == golden.size());
  const auto num_rows = io::read_json(merged / "config.json")["vocab_size"].get<std::size_t>();
  std::vector<std::int64_t> rows(num_rows);
  std::iota(rows.begin(), rows.end(), 0);  // rows without a token are alike
  for (const auto& [token, row] : golden.items()) {
    INFO(token);
    const auto* found = ours.find(token);
    REQUIRE(found != nullptr);
    rows[static_cast<std::size_t>(found->id)] = row.get<std::int64_t>();
  }
  return rows;
}

struct Verdict {
  double largest = 0.0;  // in units of the rule
  std::size_t outside = 0, unequal = 0, count = 0;
};

void compare(const std::string& name, const std::string& tensor, const io::TensorView& ours, const io::TensorView& golden,
             const std::vector<double>& largest, const Rule& rule, const std::vector<std::int64_t>& rows, Verdict& verdict) {
  INFO(name << ": " << tensor);
  REQUIRE(ours.dtype == golden.dtype);
  REQUIRE(ours.shape == golden.shape);
  const auto a = values_of(ours), stored = values_of(golden);
  auto g = stored;
  for (std::size_t row = 0; row < rows.size(); ++row) {
    const auto length = static_cast<std::size_t>(golden.shape.back());
    std::copy_n(stored.begin() + rows[row] * golden.shape.back(), length, g.begin() + static_cast<std::ptrdiff_t>(row * length));
  }
  double top = 0.0;
  for (const auto value : g) top = std::max(top, std::abs(value));
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double unit = largest.empty() ? 1.0 : ours.dtype == io::DType::kF32 ? top : ulp_at(largest[i], ours.dtype);
    const double error = a[i] == g[i] ? 0.0 : std::abs(a[i] - g[i]) / unit;
    REQUIRE(!std::isnan(error));
    if (error > rule.max_error) {
      ++verdict.outside;
      if (rule.outside_fraction == 0.0) {
        FAIL_CHECK("element " << i << ": got " << a[i] << ", golden " << g[i] << ", off by " << error);
        return;
      }
    } else {
      verdict.largest = std::max(verdict.largest, error);
    }
    verdict.unequal += a[i] != g[i] ? 1 : 0;
    ++verdict.count;
  }
}

}  // namespace

TEST_CASE("mergekit's outputs for its own configurations", "[merging][golden]") {
  const auto folder = test::golden_folder("merge");
  if (!folder) return;
  const WorkingDirectory there(*folder);
  const auto manifest = io::read_json(*folder / "manifest.json");
  std::size_t seen = 0;
  for (const auto& entry : fs::directory_iterator(*folder / "recipes")) {
    const auto name = entry.path().stem().string();
    INFO(name);
    REQUIRE(manifest.contains(name));  // an unknown case is a failure
    const auto& facts = manifest[name];
    const auto kind = facts["kind"].get<std::string>();
    // The one case without types is one that mergekit could not merge, of float32 models.
    const bool is_float32 = !facts.contains("dtypes") || facts["dtypes"].contains("float32");
    ++seen;
    if (kind != "det") continue;
    const test::TemporaryFolder out;
    auto recipe = io::read_yaml(entry.path())[0].value;
    const auto plan = plan_of(entry.path(), 1);
    execute(plan, {.out = out / "merged"});
    const io::CheckpointFolder merged(out / "merged");
    const auto golden = io::SafetensorsFile::open(*folder / "outputs" / (name + ".safetensors"));

    const auto rows = golden_rows(*folder / "outputs" / (name + ".vocab.json"), out / "merged");
    Verdict verdict;
    std::set<std::string> wanted;
    for (const auto& view : golden.tensors()) {
      // The tied model stores no head, and a head equal to its embedding need not be stored.
      if (name == "linear_tied_mixed_bf16" && view.name == "lm_head.weight") continue;
      wanted.insert(view.name);
      const auto* ours = merged.find(view.name);
      INFO(view.name);
      REQUIRE(ours != nullptr);
      const auto planned = std::ranges::find(plan.tensors, view.name, &PlannedTensor::name);
      const bool is_float = ours->dtype != io::DType::kI64;
      const auto rule = is_float ? rule_of(name, recipe, ours->dtype == io::DType::kF32) : Rule{};
      const bool has_rows_of_tokens = !rows.empty() && (view.name == "lm_head.weight" || view.name == "model.embed_tokens.weight");
      compare(name, view.name, *ours, view,
              is_float ? largest_inputs(*planned, static_cast<std::size_t>(view.num_elements())) : std::vector<double>{}, rule,
              has_rows_of_tokens ? rows : std::vector<std::int64_t>{}, verdict);
    }
    for (const auto* ours : merged.tensors()) CHECK(wanted.contains(ours->name));
    const auto rule = rule_of(name, recipe, is_float32);
    CHECK(static_cast<double>(verdict.outside) <= rule.outside_fraction * static_cast<double>(verdict.count));
    CHECK(static_cast<double>(verdict.count - verdict.unequal) >= rule.equal_fraction * static_cast<double>(verdict.count));
    if (kBitExact.contains(name)) CHECK(verdict.unequal == 0);
    const auto expected_config = facts.value("config", Json::object());
    for (const auto& [key, value] : expected_config.items()) {
      INFO(key);
      if (!is_config_comparable(name, key)) continue;
      const auto& config = merged.config();
      const auto ours = key == "dtype" && !config.contains("dtype") ? "torch_dtype" : key;
      if (key == "tie_word_embeddings" && !config.contains(key)) continue;  // the default of its family
      CHECK(config[ours] == value);
    }
    test::log_golden("merge/" + name, fmt::format("ok, largest error {:.2g} of {}, {:.2f} % equal", verdict.largest,
                                                  is_float32 ? "the largest value" : "an input ULP",
                                                  100.0 * static_cast<double>(verdict.count - verdict.unequal) /
                                                      static_cast<double>(verdict.count)));
  }
  CHECK(seen == manifest.size());
}

TEST_CASE("random methods keep and rescale as mergekit does", "[merging][golden]") {
  const auto folder = test::golden_folder("merge");
  if (!folder) return;
  const WorkingDirectory there(*folder);
  const auto manifest = io::read_json(*folder / "manifest.json");
  for (const auto& [name, facts] : manifest.items()) {
    if (facts["kind"] != "random") continue;
    const auto stats = io::read_json(*folder / "stats" / (name + ".json"));
    constexpr int kSeeds = 10;
    const int golden_seeds = facts["seeds"].get<int>();
    std::map<std::string, double> kept_sum, ratio_sum;
    for (int seed = 0; seed < kSeeds; ++seed) {
      const test::TemporaryFolder out;
      const auto plan = plan_of(*folder / "recipes" / (name + ".yaml"), static_cast<std::uint64_t>(seed));
      execute(plan, {.out = out / "merged"});
      const io::CheckpointFolder merged(out / "merged");
      for (const auto& tensor : plan.tensors) {
        const auto ours = values_of(*merged.find(tensor.name));
        std::vector<double> base(ours.size()), expert(ours.size());
        tensor.base->source->read(0, static_cast<std::int64_t>(base.size()), base.data());
        tensor.inputs[0].source->read(0, static_cast<std::int64_t>(base.size()), expert.data());
        double kept = 0.0, nonzero = 0.0, out_l1 = 0.0, in_l1 = 0.0;
        for (std::size_t i = 0; i < base.size(); ++i) {
          nonzero += expert[i] != base[i] ? 1.0 : 0.0;
          kept += expert[i] != base[i] && ours[i] != base[i] ? 1.0 : 0.0;
          out_l1 += std::abs(ours[i] - base[i]);
          in_l1 += std::abs(expert[i] - base[i]);
        }
        kept_sum[tensor.name] += nonzero > 0.0 ? kept / nonzero : 0.0;
        ratio_sum[tensor.name] += in_l1 > 0.0 ? out_l1 / in_l1 : 1.0;
      }
    }
    double worst = 0.0;
    for (const auto& [tensor, expected] : stats.items()) {
      if (tensor == "__pooled__") continue;
      INFO(name << ": " << tensor);
      REQUIRE(kept_sum.contains(tensor));
      const double nonzero = expected["nonzero"].get<double>();
      if (nonzero == 0.0) continue;
      // bf16 storage hides the smallest kept entries from both alike.
      const double sd = std::max(expected["kept_fraction_sd"].get<double>(), 1.0 / nonzero);
      const double sigma = sd * std::sqrt(1.0 / kSeeds + 1.0 / golden_seeds);
      const double error = std::abs(kept_sum[tensor] / kSeeds - expected["kept_fraction_mean"].get<double>()) / sigma;
      worst = std::max(worst, error);
      CHECK(error < 5.0);
      if (name.find("norescale") == std::string::npos && nonzero >= 100.0) {
        CHECK(ratio_sum[tensor] / kSeeds == Approx(expected["out_l1_over_in_l1"].get<double>()).epsilon(0.01));
      }
    }
    test::log_golden("merge/" + name, fmt::format("ok, kept fractions within {:.1f} sigma over {} seeds", worst, kSeeds));
  }
}

TEST_CASE("configurations that mergekit cannot merge", "[merging][golden]") {
  const auto folder = test::golden_folder("merge");
  if (!folder) return;
  const WorkingDirectory there(*folder);
  // T5 1.0 with its plain feed-forward is a model like any other.
  const test::TemporaryFolder out;
  const auto plan = plan_of(*folder / "recipes/linear_t5_v10_f32.yaml", 1);
  execute(plan, {.out = out / "merged"});
  const io::CheckpointFolder merged(out / "merged"), a(*folder / "inputs/t5v10_a_f32"), base(*folder / "inputs/t5v10_base_f32");
  CHECK(merged.tensors().size() == base.tensors().size());
  for (const auto* view : base.tensors()) {
    INFO(view->name);
    const auto x = values_of(*a.find(view->name)), y = values_of(*view), ours = values_of(*merged.find(view->name));
    double top = 0.0, error = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double exact = 0.7 * x[i] + 0.3 * y[i];
      top = std::max(top, std::abs(exact));
      error = std::max(error, std::abs(ours[i] - exact));
    }
    CHECK(error <= 6e-7 * top);
  }
  test::log_golden("merge/linear_t5_v10_f32", "ok, merged (mergekit refuses it), equals float64");
  const auto message = test::user_error([&] { plan_of(*folder / "recipes/tokenizer_none_mismatch_f32.yaml", 1); });
  CHECK_THAT(message, Catch::Contains("lm_head.weight") && Catch::Contains("tokenizer_source"));
  test::log_golden("merge/tokenizer_none_mismatch_f32", "ok, refused");
}

TEST_CASE("parameters are resolved as mergekit resolves them", "[merging][golden]") {
  const auto folder = test::golden_folder("merge");
  if (!folder) return;
  const WorkingDirectory there(*folder);
  const auto manifest = io::read_json(*folder / "manifest.json");
  std::size_t compared = 0;
  for (const auto& entry : fs::directory_iterator(*folder / "stats")) {
    const auto file = entry.path().stem().string();
    constexpr std::string_view kPrefix = "resolved_";
    if (!file.starts_with(kPrefix)) continue;
    const auto name = file.substr(kPrefix.size());
    const auto plan = plan_of(*folder / "recipes" / (name + ".yaml"), 1);
    const auto golden = io::read_json(entry.path());
    for (const auto& [tensor, expected] : golden.items()) {
      INFO(name << ": " << tensor);
      const auto planned = std::ranges::find(plan.tensors, tensor, &PlannedTensor::name);
      REQUIRE(planned != plan.tensors.end());
      for (const auto& [key, value] : expected["shared"].items()) {
        INFO(key);
        const double wanted = value.is_boolean() ? (value.get<bool>() ? 1.0 : 0.0) : value.get<double>();
        const auto& method = find_method(manifest[name]["method"].get<std::string>(), name);
        const auto parameter = std::ranges::find(method.parameters, key, &Parameter::name);
        REQUIRE(parameter != method.parameters.end());
        const double ours = planned->context.shared[key];
        if (parameter->kind == Parameter::Kind::kChoice) {
          CHECK(parameter->choices[static_cast<std::size_t>(ours)] == (wanted == 1.0 ? "true" : "false"));
        } else {
          CHECK(ours == Approx(wanted).epsilon(1e-12));
        }
        ++compared;
      }
      for (const auto& input : expected["inputs"]) {
        const auto model = input[0].get<std::string>();
        for (std::size_t i = 0; i < planned->inputs.size(); ++i) {
          if (plan.models[planned->inputs[i].model].name != model) continue;
          for (const auto& [key, value] : input[1].items()) {
            INFO(model << " " << key);
            CHECK(planned->context.inputs[i].parameters[key] == Approx(value.get<double>()).epsilon(1e-12));
            ++compared;
          }
        }
      }
    }
  }
  CHECK(compared > 500);
  test::log_golden("merge/resolved", fmt::format("ok, {} parameters", compared));
}

}  // namespace mergex::merging
