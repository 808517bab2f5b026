#pragma once

#include <cstdint>

namespace mergex::merging {

/// Lanes of a sum: element i of a tensor's unit is added to lane i % kLanes, so that neither the width of a machine's
/// vectors nor the place where tiles end has an effect on the result.
inline constexpr int kLanes = 16;

/// Elements that methods work on at a time: what they keep of one input stays in a first-level cache.
inline constexpr std::int64_t kBlock = 1024;

/// Elements that one call of `random_words` covers per block.
inline constexpr std::int64_t kRandomBlock = 64;

/// Integer as wide as T: the sign and magnitude of a value, compared as bits.
template <class T>
struct BitsOf;
template <>
struct BitsOf<float> {
  using type = std::uint32_t;
};
template <>
struct BitsOf<double> {
  using type = std::uint64_t;
};
template <class T>
using Bits = typename BitsOf<T>::type;

/// What `count_around` finds.
struct CountsAround {
  std::int64_t above = 0, equal = 0, others = 0;
};

/// Inner loops over spans of floats or doubles, in one version per instruction set; `span_kernels` chooses by the
/// processor that runs. Every version computes the same bits: the order of operations is fixed, products and sums are
/// not fused except where it says fma. (Of two NaN operands either may be the result; `narrow` writes but one NaN.)
/// Spans may start anywhere in memory, at an odd byte too where they are `void`.
template <class T>
struct SpanKernels {
  const char* name;  ///< "avx512", "avx2", "plain"

  // Stored values -> T, exactly (float64 -> float32 rounds to nearest even).
  void (*widen_f16)(std::int64_t count, const void* from, T* to);
  void (*widen_bf16)(std::int64_t count, const void* from, T* to);
  void (*widen_f32)(std::int64_t count, const void* from, T* to);
  void (*widen_f64)(std::int64_t count, const void* from, T* to);

  // T -> stored values: one rounding to nearest even, subnormals kept, every NaN becomes the positive quiet one.
  // Return how many results are not finite.
  std::int64_t (*narrow_f16)(std::int64_t count, const T* from, void* to);
  std::int64_t (*narrow_bf16)(std::int64_t count, const T* from, void* to);
  std::int64_t (*narrow_f32)(std::int64_t count, const T* from, void* to);
  std::int64_t (*narrow_f64)(std::int64_t count, const T* from, void* to);

  /// out = a - b
  void (*difference)(std::int64_t count, const T* a, const T* b, T* out);
  /// x *= factor
  void (*scale)(std::int64_t count, T factor, T* x);
  /// x += a
  void (*add)(std::int64_t count, const T* a, T* x);
  /// x /= divisor
  void (*divide)(std::int64_t count, T divisor, T* x);
  /// x /= divisor[i], by 1 where |divisor[i]| < 1e-8
  void (*divide_each)(std::int64_t count, const T* divisor, T* x);
  /// out = fma(x, weight, out)
  void (*multiply_add)(std::int64_t count, const T* x, T weight, T* out);

  /// out = sum of coefficients[k] * inputs[k], computed in double and rounded once. With a base,
  /// base + sum of coefficients[k] * (inputs[k] - base). num_inputs > 0.
  void (*combine)(std::int64_t count, std::int64_t num_inputs, const T* const* inputs, const double* coefficients,
                  const T* base, T* out);

  /// The vote of TIES at every element: the sign of deltas[0] + deltas[1] + ... is elected (`tie_is_negative` decides
  /// where the sum is 0), the deltas that have it agree, zeros never do. sum = sum of agreeing deltas[k] * factors[k],
  /// shares = sum of their shares[k], both from left to right. Deltas lie `stride` apart.
  void (*elect)(std::int64_t count, std::int64_t num_deltas, const T* deltas, std::int64_t stride, const T* factors,
                const T* shares, bool tie_is_negative, T* sum, T* share_sum);

  /// out = population variance of deltas[0], deltas[1], ... (`stride` apart), in double, rounded once.
  void (*variance)(std::int64_t count, std::int64_t num_deltas, const T* deltas, std::int64_t stride, T* out);

  /// lanes[i] += (a - base) * (b - base) in double, where i = (first + position) % kLanes; no base: a * b.
  void (*dot)(std::int64_t count, std::int64_t first, const T* a, const T* b, const T* base, double* lanes);
  /// What a report compares an input by, d = x - reference: lanes[i] += d * d, lanes[kLanes + i] += x * result,
  /// lanes[2 * kLanes + i] += x * x, lanes[3 * kLanes + i] += result * result, where products of one call are added in T.
  /// signs |= 1 where d > 0, 2 where d < 0, unless it is nullptr.
  void (*compare)(std::int64_t count, const T* x, const T* reference, const T* result, Bits<T>* signs, double* lanes);
  /// How many are 3.
  std::int64_t (*count_conflicts)(std::int64_t count, const Bits<T>* signs);
  /// lanes[i] += |a|
  void (*sum_magnitudes)(std::int64_t count, std::int64_t first, const T* a, double* lanes);
  std::int64_t (*count_nonzero)(std::int64_t count, const T* a);

  // Selection by magnitude: the bits of a value without its sign, in digits of 16 bits from the top (the first digit
  // has 15 bits: float, two digits; double, four).

  /// ++counts[digit + 32768 * (position % 2)] of the first digit: two tables, as equal neighbours would wait for each
  /// other in one.
  void (*count_first_digit)(std::int64_t count, const T* values, std::uint32_t* counts);
  /// ++counts[(magnitude >> shift) & 65535] where magnitude >> (shift + 16) == prefix
  void (*count_next_digit)(std::int64_t count, const T* values, int shift, Bits<T> prefix, std::uint32_t* counts);
  std::int64_t (*count_equal)(std::int64_t count, const T* values, Bits<T> magnitude);
  /// Magnitudes above `high` and equal to `pivot` are counted, the other ones in [low, high] written to `others`, in order.
  /// @param count   at most kBlock
  /// @param others  room for kBlock + kLanes; what lies behind the result is undefined
  CountsAround (*count_around)(std::int64_t count, const T* values, Bits<T> low, Bits<T> pivot, Bits<T> high,
                               Bits<T>* others);
  /// values = 0 where the magnitude of keys[i] is outside [at_least, below)
  void (*keep_between)(std::int64_t count, const T* keys, Bits<T> at_least, Bits<T> below, T* values);

  /// Philox-4x32-10: word w of counter 16 * block + lane goes to words[64 * block + 16 * w + lane], for num_blocks
  /// blocks from first_block on.
  void (*random_words)(std::uint64_t first_block, std::int64_t num_blocks, std::uint64_t key, std::uint32_t* words);
  /// values = 0 where words[i] >= threshold
  void (*keep_drawn)(std::int64_t count, const std::uint32_t* words, std::uint32_t threshold, T* values);
};

/// Instruction sets, from the widest; `kBest` is what this processor has.
enum class InstructionSet { kBest, kAvx512, kAvx2, kPlain };

/// @return nullptr where this processor lacks the set
template <class T>
const SpanKernels<T>* span_kernels(InstructionSet set);

/// The widest that this processor has.
template <class T>
const SpanKernels<T>& span_kernels() {
  static const SpanKernels<T>& best = *span_kernels<T>(InstructionSet::kBest);
  return best;
}

}  // namespace mergex::merging
