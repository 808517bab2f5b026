#pragma once

#include <torch/nn/module.h>

#include <optional>
#include <utility>

#include "routing/fused_curvature.h"
#include "tensor/tensor.h"

namespace mergex::routing {

// R rank, N experts, O = A1 * A2 out_features, I = B1 * B2 in_features

/// The most square way to write a width as a product: (a, w/a) with a the largest divisor <= sqrt(w).
std::pair<std::int64_t, std::int64_t> factor_pair(std::int64_t width);

/// The curvature operator on each expert's task vector:
///   sum over r of (c1_out[r,i] (x) c2_out[r,i]) tau_i (c1_in[r,i] (x) c2_in[r,i])^T
/// @param tau_NOI
/// @param c1_out [R, N, A1, A1]  @param c2_out [R, N, A2, A2]  @param c1_in [R, N, B1, B1]  @param c2_in [R, N, B2, B2]
/// @return [N, O, I]
/// Source: Nguyen et al. 2025 (arXiv:2502.18821), after Park and Oliva 2019 (arXiv:1902.03356).
Tensor apply_curvature(const Tensor& tau_NOI, const Tensor& c1_out, const Tensor& c2_out, const Tensor& c1_in,
                       const Tensor& c2_in);

/// How the operator is computed; both give the same numbers.
enum class CurvatureKernel {
  kAutomatic,    ///< fused where the tensors allow it
  kFused,        ///< `fused_curvature`: float32 or float64 on the CPU
  kContraction,  ///< `apply_curvature`
};

/// What the sum over r is at the start.
enum class RankInit {
  kIdentityTotal,   ///< I for every rank: term 0 is the identity, the others start at zero through `c1_out` alone, so
                    ///< that their gradient reaches that factor
  kIdentityEachSum  ///< R * I: every term is the identity
};

/// The trainable factors of one merged linear.
struct Curvature : torch::nn::Module {
  /// @param in_features  none for a bias, whose task vectors are [N, O, 1]: then there are only the `_out` factors
  Curvature(std::int64_t rank, std::int64_t num_experts, std::int64_t out_features,
            std::optional<std::int64_t> in_features, const at::TensorOptions& tensors);

  void initialize(RankInit init = RankInit::kIdentityTotal);

  /// [N, O, I] -> [N, O, I], by contraction
  Tensor forward(const Tensor& tau_NOI) const;
  /// after * M (scale * before * (experts - base))
  /// @param experts_NOI,base_OI  @return [N, O, I]
  Tensor curved_task_vectors(const Tensor& experts_NOI, const Tensor& base_OI, const CurvatureMasks& masks,
                             double scale, CurvatureKernel kernel = CurvatureKernel::kAutomatic) const;

  Tensor c1_out, c2_out, c1_in, c2_in;

 private:
  /// A factor of the columns, [R, N, 1, 1] of ones for a bias.
  Tensor in_factor(const Tensor& c) const;
};

}  // namespace mergex::routing
