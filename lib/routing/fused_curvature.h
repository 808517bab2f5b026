#pragma once

#include "tensor/tensor.h"

namespace mergex::routing {

// R rank, N experts, O = A1 * A2 out_features, I = B1 * B2 in_features

/// Which entries take part, before and after the operator: bool [N, O, I]; undefined: all.
struct CurvatureMasks {
  Tensor before_NOI = {}, after_NOI = {};
};

/// Whether `fused_curvature` can take these tensors: float32 or float64 on the CPU.
bool can_fuse_curvature(const Tensor& experts_NOI);

/// after * M (scale * before * (experts - base)), M as in `apply_curvature`, with gradients for experts, base and
/// factors. Work is done tile by tile in the processor's cache: neither the difference nor anything between the
/// factors is stored, and the backward pass computes it again.
/// @return [N, O, I]
Tensor fused_curvature(const Tensor& experts_NOI, const Tensor& base_OI, const CurvatureMasks& masks, double scale,
                       const Tensor& c1_out, const Tensor& c2_out, const Tensor& c1_in, const Tensor& c2_in);

}  // namespace mergex::routing
