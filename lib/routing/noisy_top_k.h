#pragma once

#include "routing/router.h"

namespace mergex::routing {

struct Gating {
  Tensor scores_UN;     ///< softmax over the k largest logits of each unit; 0 elsewhere
  Tensor importance_N;  ///< sum of the scores an expert gets
  Tensor load_N;        ///< expected (with noise and k < N) or counted number of units an expert serves
};

/// Noisy top-k gating: logits = h W_g, with noise (softplus(h W_n) + noise_std_floor) * eps added while training.
/// @param h_UD          routed features
/// @param w_gate_DN,w_noise_DN
/// @param noise_UN      standard normal draws; undefined: no noise (evaluation)
/// Equal logits fall to the lower index.
/// Source: Shazeer et al. 2017, section 2.1 and appendix A (arXiv:1701.06538).
Gating noisy_top_k(const Tensor& h_UD, const Tensor& w_gate_DN, const Tensor& w_noise_DN, const Tensor& noise_UN,
                   std::int64_t top_k, double noise_std_floor = 0.01);

/// Squared coefficient of variation, Var / (mean^2 + 1e-10) with the unbiased variance; 0 for a single expert.
Tensor cv_squared(const Tensor& v_N);

/// coefficient * (CV^2(importance) + CV^2(load)). Source: as above, section 4.
Tensor balance_loss(const Gating& gating, double coefficient);

extern const RouterKind kNoisyTopK;

}  // namespace mergex::routing
