#include <fmt/format.h>

#include <cmath>
#include <map>

#include "io/checkpoint_folder.h"
#include "merging/methods.h"
#include "merging/source.h"
#include "support/catch.h"
#include "support/merging.h"
#include "support/paths.h"

// Methods against the reference numbers of tests/golden/merge (NOTES.md), without recipes and files: the same tensors
// and parameters, handed to the methods in tiles of an awkward size.

namespace mergex::merging {
namespace {

namespace fs = std::filesystem;
using test::Named;

struct Case {
  std::string name;  ///< of the golden output
  const Method* method;
  std::string base;  ///< "" where the method gets none
  std::vector<std::string> inputs;
  std::vector<Named> per_input = {};
  Named shared = {};
  bool bit_exact = false;  ///< NOTES: "0 mismatches"
};

std::vector<Case> cases() {
  const std::vector<std::string> abc{"a", "b", "c"};
  const std::vector<Named> w259{{{"weight", 0.2}}, {{"weight", 0.5}}, {{"weight", 0.9}}};
  const auto with = [](std::vector<Named> all, std::initializer_list<std::pair<const std::string, double>> more) {
    for (auto& one : all) one.insert(more);
    return all;
  };
  const std::vector<Named> densities{
      {{"weight", 0.2}, {"density", 0.5}}, {{"weight", 0.5}, {"density", 0.3}}, {{"weight", 0.9}, {"density", 0.2}}};
  const std::vector<Named> w632{{{"weight", 0.6}}, {{"weight", 0.3}}, {{"weight", 0.2}}};
  const std::vector<Named> w36{{{"weight", 0.3}}, {{"weight", 0.6}}};
  const std::vector<Named> w536{{{"weight", 0.5}}, {{"weight", 0.3}}, {{"weight", 0.6}}};
  return {
      {"linear_weighted_f32", &kLinear, "", abc, w259, {}, true},
      {"linear_nonorm_f32",
       &kLinear,
       "",
       abc,
       {{{"weight", 0.3}}, {{"weight", -0.2}}, {{"weight", 0.4}}},
       {{"normalize", 0}}},
      {"linear_f32math_bf16", &kLinear, "", abc, w259},
      {"linear_native_bf16", &kLinear, "", abc, w259},
      {"slerp_t_f32", &kSlerp, "base", {"c"}, {}, {{"t", 0.35}}},
      {"slerp_near_f32", &kSlerp, "base", {"a"}, {}, {{"t", 0.35}}},
      {"slerp_extrapolate_f32", &kSlerp, "c", {"base"}, {}, {{"t", 1.25}}},
      {"slerp_f32math_bf16", &kSlerp, "base", {"c"}, {}, {{"t", 0.35}}},
      {"slerp_native_bf16", &kSlerp, "base", {"c"}, {}, {{"t", 0.35}}},
      {"nuslerp_flat_f32", &kNuslerp, "", {"b", "c"}, w36},
      {"nuslerp_base_f32", &kNuslerp, "base", {"b", "c"}, w36},
      {"nuslerp_rows_f32", &kNuslerp, "", {"b", "c"}, w36, {{"nuslerp_flatten", 0}}},
      {"nuslerp_cols_f32", &kNuslerp, "", {"b", "c"}, w36, {{"nuslerp_flatten", 0}, {"nuslerp_row_wise", 1}}},
      {"nuslerp_f32math_bf16", &kNuslerp, "", {"b", "c"}, w36},
      {"multislerp_f32", &kMultislerp, "", abc, w536},
      {"multislerp_nonorm_f32", &kMultislerp, "", abc, w536, {{"normalize_weights", 0}}},
      {"multislerp_base2_f32", &kMultislerp, "base", {"b", "c"}, w36},
      {"multislerp_base3_f32", &kMultislerp, "base", abc, w536},
      {"karcher_f32", &kKarcher, "", abc},
      {"karcher_f32math_bf16", &kKarcher, "", abc},
      {"karcher_iters_f32", &kKarcher, "", {"base", "b", "c"}, {}, {{"max_iter", 50}, {"tol", 1e-7}}},
      {"task_arithmetic_f32", &kTaskArithmetic, "base", abc, w632, {{"lambda", 0.8}}, true},
      {"task_arithmetic_negative_f32", &kTaskArithmetic, "base", {"a", "c"}, {{{"weight", 0.6}}, {{"weight", -0.3}}}},
      {"task_arithmetic_normalize_f32", &kTaskArithmetic, "base", abc, w632, {{"normalize", 1}, {"lambda", 1.2}}},
      {"task_arithmetic_zero_weight_sum_f32",
       &kTaskArithmetic,
       "base",
       {"a", "b"},
       {{{"weight", 0.5}}, {{"weight", -0.5}}},
       {{"normalize", 1}}},
      {"task_arithmetic_f32math_bf16", &kTaskArithmetic, "base", abc, w632, {}, true},
      {"task_arithmetic_native_bf16", &kTaskArithmetic, "base", abc, w632},
      {"ties_f32", &kTies, "base", abc, with(w259, {{"density", 0.5}})},
      {"ties_densities_f32", &kTies, "base", abc, densities, {{"lambda", 0.9}}, true},
      {"ties_density1_f32", &kTies, "base", abc, {{{"weight", 1.0}}}},
      {"ties_tiny_density_f32", &kTies, "base", abc, with(w259, {{"density", 0.004}})},
      {"ties_density0_f32",
       &kTies,
       "base",
       abc,
       {{{"weight", 0.2}, {"density", 0}}, {{"weight", 0.5}, {"density", 0.5}}, {{"weight", 0.9}, {"density", 0.3}}}},
      {"ties_vote_flip_f32", &kTies, "base", abc,
       with({{{"weight", 2.5}}, {{"weight", 0.4}}, {{"weight", 0.02}}}, {{"density", 0.8}})},
      {"ties_negative_weight_f32",
       &kTies,
       "base",
       {"a", "b"},
       with({{{"weight", 1.0}}, {{"weight", -0.6}}}, {{"density", 0.7}})},
      {"ties_rescale_f32", &kTies, "base", abc, densities, {{"rescale", 1}, {"normalize", 0}}},
      {"ties_f32math_bf16", &kTies, "base", abc, densities, {}, true},
      {"ties_native_bf16", &kTies, "base", abc, densities},
      {"breadcrumbs_f32", &kBreadcrumbs, "base", abc, with(w259, {{"density", 0.6}, {"gamma", 0.05}}), {}, true},
      {"breadcrumbs_gamma0_f32", &kBreadcrumbs, "base", abc, with(w259, {{"density", 0.6}, {"gamma", 0.0}})},
      {"breadcrumbs_overfull_f32",
       &kBreadcrumbs,
       "base",
       {"a", "b"},
       {{{"weight", 1}, {"density", 0.97}, {"gamma", 0.2}}, {{"weight", 1}, {"density", 0.9}}}},
      {"breadcrumbs_ties_f32",
       &kBreadcrumbsTies,
       "base",
       abc,
       with(w259, {{"density", 0.6}, {"gamma", 0.02}}),
       {{"lambda", 0.7}}},
      {"breadcrumbs_ties_f32math_bf16", &kBreadcrumbsTies, "base", abc,
       with(w259, {{"density", 0.6}, {"gamma", 0.02}})},
      {"dare_linear_density1_f32", &kDareLinear, "base", {"a", "b"}, {{{"weight", 0.6}}, {{"weight", 0.3}}}},
      {"sce_f32", &kSce, "base", abc},
      {"sce_topk_f32", &kSce, "base", abc, {}, {{"select_topk", 0.3}}},
      {"sce_small_f32", &kSce, "base", {"a", "b"}, {}, {{"select_topk", 0.5}}},
      {"sce_topk_f32math_bf16", &kSce, "base", abc, {}, {{"select_topk", 0.3}}},
      {"ram_f32", &kRam, "base", abc, {}, {{"epsilon", 1e-3}}},
      {"ramplus_tl_f32", &kRamplusTl, "base", abc, {}, {{"epsilon", 1e-3}, {"r", 0.2}, {"alpha", 0.5}}},
      {"nearswap_f32", &kNearswap, "base", {"b"}, {}, {{"t", 0.003}}},
      {"arcee_fusion_f32", &kArceeFusion, "base", {"c"}},
      {"arcee_fusion_native_bf16", &kArceeFusion, "base", {"c"}},
      {"arcee_fusion_f32math_bf16", &kArceeFusion, "base", {"c"}},
      {"passthrough_whole_bf16", &kPassthrough, "", {"b"}, {}, {}, true},
      {"model_stock_f32", &kModelStock, "base", abc},
      {"model_stock_filterwise_f32", &kModelStock, "base", abc, {}, {{"filter_wise", 1}}},
      {"model_stock_f32math_bf16", &kModelStock, "base", abc},
  };
}

std::vector<float> read(const io::TensorView& view) {
  std::vector<float> values(static_cast<std::size_t>(view.num_elements()));
  StoredTensor(view).read(0, view.num_elements(), values.data());
  return values;
}

/// A unit in the last place of a 16-bit type at this magnitude.
double unit_in_last_place(double magnitude, io::DType dtype) {
  const int bits = dtype == io::DType::kBF16 ? 8 : 11;
  return magnitude == 0.0 ? 0.0 : std::ldexp(1.0, std::ilogb(magnitude) - bits + 1);
}

struct Comparison {
  std::size_t elements = 0, unequal = 0;
  double worst = 0.0;  ///< float32: over the largest of the tensor; 16 bits: units in the last place of the inputs
};

void compare(const io::TensorView& golden, const std::vector<float>& got, const std::vector<float>& largest_input,
             Comparison& total) {
  const auto expected = read(golden);
  std::vector<std::byte> stored(golden.bytes.size());
  narrow_values(golden.dtype, golden.num_elements(), got.data(), stored.data());
  std::vector<float> rounded(got.size());
  widen_values(golden.dtype, golden.num_elements(), stored.data(), rounded.data());
  double largest = 0.0;
  for (const float g : expected) largest = std::max(largest, std::abs(static_cast<double>(g)));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double error = std::abs(static_cast<double>(rounded[i]) - static_cast<double>(expected[i]));
    total.unequal += error == 0.0 ? 0 : 1;
    if (golden.dtype == io::DType::kF32) {
      total.worst = std::max(total.worst, largest == 0.0 ? error : error / largest);
    } else if (error != 0.0) {
      total.worst = std::max(total.worst, error / unit_in_last_place(largest_input[i], golden.dtype));
    }
  }
  total.elements += expected.size();
}

}  // namespace

TEST_CASE("methods give the reference numbers", "[merging][golden]") {
  const auto folder = test::golden_folder("merge");
  if (!folder) return;
  std::map<std::string, io::CheckpointFolder> models;
  for (const auto& c : cases()) {
    INFO(c.name);
    const std::string type = c.name.ends_with("bf16") ? "_bf16" : "_f32";
    const auto model = [&](const std::string& letter) -> const io::CheckpointFolder& {
      const auto name = "llama_" + letter + type;
      const auto found = models.find(name);
      return found != models.end() ? found->second : models.emplace(name, *folder / "inputs" / name).first->second;
    };
    const auto golden = io::SafetensorsFile::open(*folder / "outputs" / (c.name + ".safetensors"));
    Comparison total;
    for (const auto& view : golden.tensors()) {
      test::InMemory<float> tensor;
      tensor.context = test::context_for(*c.method, view.shape, c.inputs.size(), c.per_input, c.shared);
      tensor.context.name = view.name;
      if (c.name.ends_with("native_bf16")) tensor.context.native = io::DType::kBF16;
      if (!c.base.empty()) tensor.base = read(*model(c.base).find(view.name));
      tensor.context.has_base = !c.base.empty();
      std::vector<float> largest(static_cast<std::size_t>(view.num_elements()));
      const auto note = [&](const std::vector<float>& values) {
        for (std::size_t i = 0; i < values.size(); ++i) largest[i] = std::max(largest[i], std::abs(values[i]));
      };
      if (!c.base.empty()) note(tensor.base);
      for (const auto& letter : c.inputs) note(tensor.inputs.emplace_back(read(*model(letter).find(view.name))));
      compare(view, test::merge_tensor(*c.method, tensor, {.tile = 257, .unit = 600}), largest, total);
    }
    const double equal = 1.0 - static_cast<double>(total.unequal) / static_cast<double>(total.elements);
    INFO("largest error " << total.worst << ", equal " << equal);
    const bool native = c.name.ends_with("native_bf16");
    const bool task_family = c.method->name == "task_arithmetic" || c.method->name == "ties";
    bool ok = true;
    if (c.bit_exact) {
      ok = total.unequal == 0;
    } else if (c.method->name == "arcee_fusion") {
      // A selection: near the threshold, float32 noise of the reference decides on up to 0.1 % of the entries.
      ok = equal >= 0.999;
    } else if (type == "_f32") {
      ok = total.worst <= 6e-7;
    } else {
      const double expected_equal = native ? 0.0 : c.method->name == "linear" ? 0.98 : 0.999;
      ok = total.worst <= (native && task_family ? 3.0 : 1.0) && equal >= expected_equal;
    }
    CHECK(ok);
    test::log_golden("merge method " + c.name,
                     fmt::format("{}, largest error {:.0e}, equal {:.4f}", ok ? "ok" : "FAILED", total.worst, equal));
  }
}

}  // namespace mergex::merging
