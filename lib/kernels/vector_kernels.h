#pragma once

#include <cstdint>

namespace mergex::kernels {

/// Inner loops over tiles, in one version per instruction set; `vector_kernels` chooses by the processor that runs.
template <class T>
struct VectorKernels {
  const char* name;  ///< "avx512", "avx2", "plain"
  int width;         ///< entries of T in a vector

  /// C [m, n] = A B, or += with `accumulate`. A(i, k) lies at a[i * a_row + k * a_column], so A may be transposed.
  /// Columns beyond the last whole vector are computed one by one.
  void (*multiply)(std::int64_t m, std::int64_t n, std::int64_t k, const T* a, std::int64_t a_row,
                   std::int64_t a_column, const T* b, std::int64_t b_row, T* c, std::int64_t c_row, bool accumulate);

  /// C [m, p] += sum over `batches` of A B^T, A [m, n] and B [p, n], each batch a stride after the one before; n is a
  /// multiple of `width` (callers pad with zeros).
  void (*multiply_transposed)(std::int64_t batches, std::int64_t m, std::int64_t p, std::int64_t n, const T* a,
                              std::int64_t a_row, std::int64_t a_batch, const T* b, std::int64_t b_row,
                              std::int64_t b_batch, T* c, std::int64_t c_row);

  /// out = scale * (minuend - subtrahend), 0 where `keep` is 0; `subtrahend` and `keep` may be null. Any `count`.
  void (*difference)(std::int64_t count, const T* minuend, const T* subtrahend, const std::uint8_t* keep, T scale,
                     T* out);

  /// keep[i] = 1 where terms[i] - base has the sign of the sum over i of terms[i] - base (three signs: -, 0, +), else 0.
  /// Any `count`.
  void (*elect_signs)(std::int64_t count, std::int64_t num_terms, const T* terms, std::int64_t term_stride,
                      const T* base, std::uint8_t* keep, std::int64_t keep_stride);

  /// out[u] = (base ? base : 0) + sum over i < num_terms of scores[u * num_terms + i] * terms[i], for u < num_units.
  /// Entries of `terms` are `term_stride` apart, those of `out` `out_stride`; any `count`.
  void (*mix)(std::int64_t count, std::int64_t num_units, std::int64_t num_terms, const T* scores, const T* base,
              const T* terms, std::int64_t term_stride, T* out, std::int64_t out_stride);

  /// What `mix` sends back: term_gradients[i] += sum_u scores[u, i] g[u] and score_gradients[u, i] += <g[u], terms[i]>.
  void (*mix_backward)(std::int64_t count, std::int64_t num_units, std::int64_t num_terms, const T* scores, const T* g,
                       std::int64_t g_stride, const T* terms, std::int64_t term_stride, T* term_gradients,
                       T* score_gradients);
};

/// Instruction sets, from the widest; `kBest` is what this processor has.
enum class InstructionSet { kBest, kAvx512, kAvx2, kPlain };

/// @return nullptr where this processor lacks the set
template <class T>
const VectorKernels<T>* vector_kernels(InstructionSet set = InstructionSet::kBest);

}  // namespace mergex::kernels
