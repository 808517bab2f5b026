#pragma once

#include "tensor/tensor.h"

namespace mergex::routing {

// B sentences, T tokens, N terms, O out_features, I in_features

/// Whether `tiled_product` can take these tensors: float32 or float64 on the CPU, all alike.
bool can_tile_product(const Tensor& x_BTI, const Tensor& terms_NOI);

/// y_b = x_b (base + sum_i scores_bi terms_i)^T. Weights of a sentence are merged in tiles of the processor's cache and
/// multiplied there, so that they never exist as a whole; the backward pass merges them again. Where `terms_NOI` is a
/// leaf, its gradient is added up in place, one buffer for all micro-batches of a step: for backward(), not for grad().
/// @param base_OI  undefined: 0
/// @return [B, T, O]
Tensor tiled_product(const Tensor& x_BTI, const Tensor& terms_NOI, const Tensor& base_OI, const Tensor& scores_BN);

}  // namespace mergex::routing
