#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "io/json.h"
#include "io/safetensors.h"
#include "tensor/tensor.h"

namespace mergex::test {

using Tensors = std::map<std::string, Tensor>;
Tensors read_tensors(const std::filesystem::path& file);

struct Tolerance {
  double relative, absolute;
};
inline constexpr Tolerance kFloat64{1e-10, 1e-12}, kFloat32{1e-5, 1e-6}, kLogits{1e-4, 1e-4};

/// Largest |got - expected| over absolute + relative * |expected|: at most 1 passes.
struct Comparison {
  double worst = 0.0;       ///< in units of the tolerance
  double difference = 0.0;  ///< largest absolute difference
  std::string what = {};    ///< where, with both values, when it fails
};
Comparison compare(const Tensor& got, const Tensor& expected, Tolerance tolerance);
/// Fails the running test with name, worst index and both values.
void require_close(const std::string& name, const Tensor& got, const Tensor& expected, Tolerance tolerance);
/// Gradients: within `share` of the largest entry of the expected tensor; `floor` bounds those that are 0 by algebra.
void require_gradient(const std::string& name, const Tensor& got, const Tensor& expected, double share, double floor);

/// Normal numbers of a seed, the same on every machine; float64 unless told otherwise.
Tensor seeded_normal(at::IntArrayRef sizes, std::uint64_t seed, at::ScalarType dtype = at::kDouble);

/// Central differences of a scalar function with respect to every entry of `x` (float64).
Tensor finite_differences(const std::function<double(const Tensor&)>& f, const Tensor& x, double step = 1e-6);

}  // namespace mergex::test
