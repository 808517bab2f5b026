#include "merging/comparison.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "merging/span_kernels.h"

namespace mergex::merging {
namespace {

/// Sums of the products of one input, by lane.
using Lanes = std::array<double, 4 * kLanes>;

template <class T>
void add_products(std::int64_t count, const T* x, const T* reference, const T* result, Bits<T>* signs, Lanes& lanes) {
  const auto before = lanes;
  span_kernels<T>().compare(count, x, reference, result, signs, lanes.data());
  if constexpr (sizeof(T) == sizeof(float)) {
    if (std::ranges::all_of(lanes, [](double lane) { return std::isfinite(lane); })) return;
    lanes = before;  // squares that only double can hold
    std::array<double, kBlock> wide_x, wide_reference, wide_result;
    std::copy_n(x, count, wide_x.begin());
    std::copy_n(reference, count, wide_reference.begin());
    std::copy_n(result, count, wide_result.begin());
    span_kernels<double>().compare(count, wide_x.data(), wide_reference.data(), wide_result.data(), nullptr,
                                   lanes.data());
  }
}

double sum_of(const Lanes& lanes, int product) {
  const auto first = lanes.begin() + product * kLanes;
  return std::accumulate(first, first + kLanes, 0.0);
}

void add_lanes(const Lanes& lanes, Comparison::Input& sums) {
  sums.distance += sum_of(lanes, 0);
  sums.dot += sum_of(lanes, 1);
  sums.square += sum_of(lanes, 2);
}

}  // namespace

template <class T>
void Comparison::add(std::int64_t count, const T* base_values, std::span<const T* const> values, const T* result) {
  std::vector<Lanes> lanes(values.size());
  Lanes base_lanes{};
  const bool counts_conflicts = base_values != nullptr && values.size() > 1;
  std::array<Bits<T>, kBlock> signs;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const auto n = std::min(kBlock, count - begin);
    const T* reference = (base_values != nullptr ? base_values : result) + begin;
    if (counts_conflicts) signs.fill(0);
    for (std::size_t i = 0; i < values.size(); ++i) {
      add_products(n, values[i] + begin, reference, result + begin, counts_conflicts ? signs.data() : nullptr,
                   lanes[i]);
    }
    if (base_values != nullptr) add_products<T>(n, reference, reference, result + begin, nullptr, base_lanes);
    if (counts_conflicts) num_conflicts += span_kernels<T>().count_conflicts(n, signs.data());
  }
  for (std::size_t i = 0; i < values.size(); ++i) add_lanes(lanes[i], inputs[i]);
  add_lanes(base_lanes, base);
  if (!values.empty()) result_square += sum_of(lanes[0], 3);
}

template void Comparison::add(std::int64_t, const float*, std::span<const float* const>, const float*);
template void Comparison::add(std::int64_t, const double*, std::span<const double* const>, const double*);

Comparison& Comparison::operator+=(const Comparison& other) {
  const auto add = [](Input& sums, const Input& more) {
    sums.distance += more.distance;
    sums.dot += more.dot;
    sums.square += more.square;
  };
  for (std::size_t i = 0; i < inputs.size(); ++i) add(inputs[i], other.inputs[i]);
  add(base, other.base);
  result_square += other.result_square;
  num_conflicts += other.num_conflicts;
  num_not_finite += other.num_not_finite;
  return *this;
}

}  // namespace mergex::merging
