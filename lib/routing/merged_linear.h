#pragma once

#include "routing/curvature.h"
#include "routing/expert_layer.h"
#include "routing/protocol.h"
#include "routing/router.h"

namespace mergex::routing {

// U routed units, N experts, O out_features, I in_features, T tokens of a unit

/// How the merged weights are reached; all give the same numbers.
enum class Form {
  kAutomatic,  ///< the absorbed form where it is exact and cheaper
  kBase,       ///< E_m + alpha * sum_i s_i gamma_i
  kAbsorbed    ///< sum_i s_i (E_m + alpha * gamma_i), exact since scores sum to 1
};

/// What mixes into the merged weight of a unit. Source: Nguyen et al. 2025, CA-Merge (arXiv:2502.18821).
struct Mixture {
  Tensor terms_NOI;  ///< alpha * gamma_i, or E'_i in the absorbed form
  Tensor base_OI;    ///< E_m; undefined in the absorbed form
};

/// gamma_i = M_i . (mask_i * (E_i - E_m)), and what is mixed from it. Without curvature the absorbed form is
/// (1 - alpha mask_i) E_m + alpha mask_i E_i, entry by entry: at alpha = 1 an entry that all experts keep gives the base
/// exactly no gradient, where the other form would leave rounding noise that Adam blows up to full steps.
/// @param mask_NOI   undefined: keep all  @param curvature  null: identity
Mixture make_mixture(const Tensor& base_OI, const Tensor& experts_NOI, const Tensor& mask_NOI,
                     const Curvature* curvature, double alpha, Form form);

/// Merged weights of every unit, [U, O, I], by one product of scores [U, N] and terms [N, O * I].
Tensor merge_weights(const Mixture& mixture, const Tensor& scores_UN);

/// y_u = x_u (merged weight of unit u)^T, in tiles where the tensors allow it (float32 or float64 on the CPU), else by
/// merging first. Under autocast only this product is in less than float32.
/// @param x_UTI  @return [U, T, O]
Tensor merged_product(const Tensor& x_UTI, const Mixture& mixture, const Tensor& scores_UN);

/// Mean over the real tokens of each sentence. @param x_BTD  @param mask_BT  undefined: all are real  @return [B, D]
Tensor masked_mean(const Tensor& x_BTD, const Tensor& mask_BT);

struct MergedLinearOptions {
  std::int64_t num_experts;
  double alpha = 1.0;
  Mask mask;                       ///< empty: keep all
  std::int64_t curvature_rank = 0;  ///< 0: no curvature
  double auxiliary_coefficient = 0.0;
  Form form = Form::kAutomatic;     ///< while training; evaluation folds (the absorbed form) unless this says kBase
  MakeRouter make_router;
};

/// A linear whose weight is merged from experts for each sentence (CAMEx and its baselines).
/// Parameters: weight [O, I] (the base expert E_m), experts [N, O, I], router.*, curvature.*
struct MergedLinear : ExpertLayer {
  /// Every expert starts as a copy of `dense_OI`.
  MergedLinear(const Tensor& dense_OI, const MergedLinearOptions& options);

  Tensor forward(const Tensor& x_BTI, nn::ForwardContext& context) override;
  void collect_backward(std::vector<Tensor>& roots, std::vector<Tensor>& gradients) override;
  Tensor dense_weight() const override { return weight; }
  void initialize(at::Generator& generator) override;
  ParameterCounts count() const override;
  LayerReport report() const override;

  Tensor weight, experts;
  std::shared_ptr<Router> router;
  std::shared_ptr<Curvature> curvature;  // null without curvature

  /// For tests: how often weights were merged since construction.
  std::int64_t num_merges = 0;

 private:
  void prepare(bool training, tensor::RandomStreams* random) override;

  MergedLinearOptions options_;
  Mixture graph_;  // with its autograd history
  Mixture leaf_;   // what forward uses: gradients of all micro-batches add up at leaf_.terms_NOI
  double kept_fraction_ = 1.0;
  ScoreStatistics statistics_;
};

}  // namespace mergex::routing
