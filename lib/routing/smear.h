#pragma once

#include "routing/router.h"

namespace mergex::routing {

/// softmax(LayerNorm(z) LayerNorm(W)), the second norm over each expert's column of W: how large z and W are does not
/// matter.
/// @param z_UD  @param w_gate_DN  @param input_gain_D,input_bias_D,gate_gain_D,gate_bias_D  of the two norms
/// @return [U, N]
/// Source: Muqeeth et al. 2023, SMEAR (arXiv:2306.03745).
Tensor normalized_scores(const Tensor& z_UD, const Tensor& w_gate_DN, const Tensor& input_gain_D,
                         const Tensor& input_bias_D, const Tensor& gate_gain_D, const Tensor& gate_bias_D);

/// Scores of which only those that `kept_UN` (0 or 1) keeps are left.
/// @param renormalize  scale each row to the sum 1 again; a row that loses all is uniform then
Tensor drop_experts(const Tensor& scores_UN, const Tensor& kept_UN, bool renormalize);

extern const RouterKind kSmear;

}  // namespace mergex::routing
