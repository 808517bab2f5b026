#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace mergex::merging {

/// Sums over the elements of a tensor that its merge report is made of. Products are added in the arithmetic of the
/// merge over 1024 elements, and then in double.
struct Comparison {
  struct Input {
    double distance = 0.0;  ///< of (input - base)^2; without a base, of (input - result)^2
    double dot = 0.0;       ///< input * result
    double square = 0.0;    ///< input^2
  };
  std::vector<Input> inputs;
  Input base = {};  ///< where there is one
  double result_square = 0.0;
  std::int64_t num_conflicts = 0;   ///< elements where task vectors have both signs
  std::int64_t num_not_finite = 0;  ///< results as written

  explicit Comparison(std::size_t num_inputs) : inputs(num_inputs) {}

  /// @param base_values  nullptr: none
  template <class T>
  void add(std::int64_t count, const T* base_values, std::span<const T* const> values, const T* result);
  Comparison& operator+=(const Comparison& other);
};

extern template void Comparison::add(std::int64_t, const float*, std::span<const float* const>, const float*);
extern template void Comparison::add(std::int64_t, const double*, std::span<const double* const>, const double*);

}  // namespace mergex::merging
