#include "merging/comparison.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "merging/span_kernels.h"

namespace mergex::merging {
namespace {

template <class T>
using Block = std::array<T, kBlock>;

struct Products {
  Comparison::Input input;
  double result_square = 0.0;
};

template <class T>
Products compare(std::int64_t count, const T* x, const T* reference, const T* result, Bits<T>* signs) {
  T lanes[4 * kLanes] = {};
  span_kernels<T>().compare(count, x, reference, result, signs, lanes);
  double sums[4] = {};
  for (int i = 0; i < 4 * kLanes; ++i) sums[i / kLanes] += static_cast<double>(lanes[i]);
  if constexpr (sizeof(T) == sizeof(float)) {
    if (!std::ranges::all_of(sums,
                             [](double sum) { return std::isfinite(sum); })) {  // squares that only double can hold
      Block<double> wide_x, wide_reference, wide_result;
      std::copy_n(x, count, wide_x.begin());
      std::copy_n(reference, count, wide_reference.begin());
      std::copy_n(result, count, wide_result.begin());
      Block<Bits<double>> ignored{};
      return compare(count, wide_x.data(), wide_reference.data(), wide_result.data(), ignored.data());
    }
  }
  return {.input = {.distance = sums[0], .dot = sums[1], .square = sums[2]}, .result_square = sums[3]};
}

void operator+=(Comparison::Input& a, const Comparison::Input& b) {
  a.distance += b.distance;
  a.dot += b.dot;
  a.square += b.square;
}

}  // namespace

template <class T>
void Comparison::add(std::int64_t count, const T* base_values, std::span<const T* const> values, const T* result) {
  Block<Bits<T>> signs, ignored{};
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const auto n = std::min(kBlock, count - begin);
    const T* result_block = result + begin;
    signs.fill(0);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto products = compare(n, values[i] + begin, base_values != nullptr ? base_values + begin : result_block,
                                    result_block, signs.data());
      inputs[i] += products.input;
      if (i == 0) result_square += products.result_square;
    }
    if (base_values == nullptr) continue;
    base += compare(n, base_values + begin, base_values + begin, result_block, ignored.data()).input;
    if (values.size() > 1) num_conflicts += span_kernels<T>().count_conflicts(n, signs.data());
  }
}

template void Comparison::add(std::int64_t, const float*, std::span<const float* const>, const float*);
template void Comparison::add(std::int64_t, const double*, std::span<const double* const>, const double*);

Comparison& Comparison::operator+=(const Comparison& other) {
  for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i] += other.inputs[i];
  base += other.base;
  result_square += other.result_square;
  num_conflicts += other.num_conflicts;
  num_not_finite += other.num_not_finite;
  return *this;
}

}  // namespace mergex::merging
