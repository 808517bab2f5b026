#pragma once

#include <cstdint>
#include <functional>

#include "kernels/vector_kernels.h"

namespace mergex::kernels {

// B sentences, T tokens, N terms, O out_features, I in_features

/// y_b = x_b W_b^T with W_b = base + sum_i scores_bi terms_i. A weight exists only in tiles, which are merged in the
/// processor's cache and multiplied there; backward passes merge them again. All arrays are contiguous. Results do not
/// depend on the number of threads.
template <class T>
struct MergedProduct {
  std::int64_t num_sentences, num_tokens, num_terms, out_features, in_features;
  const T* x;       ///< [B, T, I]
  const T* terms;   ///< [N, O, I]
  const T* base;    ///< [O, I]; null: 0
  const T* scores;  ///< [B, N]

  const VectorKernels<T>* vectors;
  /// Calls its argument on sub-ranges that together are [0, count), at the same time where it can.
  void (*parallel)(std::int64_t count, const std::function<void(std::int64_t begin, std::int64_t end)>& body);

  /// Tokens rounded up to whole vectors.
  std::int64_t padded_tokens() const { return (num_tokens + vectors->width - 1) / vectors->width * vectors->width; }

  /// @param y  [B, T, O], overwritten  @param work_space  B * I * padded_tokens() numbers
  void forward(T* y, T* work_space) const;

  /// dx_b = dy_b W_b  @param dx  [B, T, I], overwritten
  void backward_input(const T* dy, T* dx) const;

  /// With G_b = dy_b^T x_b: terms_i += sum_b scores_bi G_b, base = sum_b G_b, scores_bi = <G_b, terms_i>.
  /// @param accumulate  false: the terms' gradient is overwritten
  /// @param base_gradient  may be null
  void backward_weights(const T* dy, T* terms_gradient, bool accumulate, T* base_gradient, T* scores_gradient) const;
};

}  // namespace mergex::kernels
