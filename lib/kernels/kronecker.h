#pragma once

#include <cstdint>
#include <functional>

#include "kernels/vector_kernels.h"

namespace mergex::kernels {

// R rank, N experts, O = A1 * A2 rows, I = B1 * B2 columns

/// gamma_n = sum over r of (c1_out[r,n] (x) c2_out[r,n]) tau_n (c1_in[r,n] (x) c2_in[r,n])^T for each expert, where
/// tau_n = scale * keep_n * (experts_n - base) is made on the way. Each pass reads a tile, applies two factors while it
/// lies in cache and writes it back; the backward pass computes its intermediates again. The result does not depend on
/// the number of threads.
template <class T>
struct Kronecker {
  std::int64_t rank, num_experts, a1, a2, b1, b2;
  const T *c1_out, *c2_out, *c1_in, *c2_in;  ///< [R, N, w, w], contiguous

  const T* experts;                          ///< [N, O, I]
  const T* base = nullptr;                   ///< [O, I]; null: 0
  const std::uint8_t* keep_before = nullptr;  ///< [N, O, I], which entries of tau take part; null: all
  const std::uint8_t* keep_after = nullptr;   ///< the same for entries of gamma
  T scale = 1;

  const VectorKernels<T>* vectors;
  /// Calls its argument on sub-ranges that together are [0, count), at the same time where it can.
  void (*parallel)(std::int64_t count, const std::function<void(std::int64_t begin, std::int64_t end)>& body);

  /// @param gamma  [N, O, I], overwritten
  void forward(T* gamma) const;

  struct Gradients {
    T* experts;                                ///< [N, O, I], overwritten
    T* base;                                   ///< [O, I], overwritten; may be null
    T *c1_out, *c2_out, *c1_in, *c2_in;        ///< [R, N, w, w], overwritten
  };
  /// @param gamma_gradient  [N, O, I]
  void backward(const T* gamma_gradient, const Gradients& gradients) const;
};

}  // namespace mergex::kernels
