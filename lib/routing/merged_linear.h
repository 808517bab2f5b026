#pragma once

#include "routing/curvature.h"
#include "routing/expert_layer.h"
#include "routing/fused_curvature.h"
#include "routing/protocol.h"
#include "routing/router.h"
#include "routing/token_adapter.h"

namespace mergex::routing {

// U routed units, N experts, O out_features, I in_features, T tokens of a unit

/// How the merged weights are reached; all give the same numbers.
enum class Form {
  kAutomatic,  ///< the absorbed form where it is exact and cheaper
  kBase,       ///< E_m + alpha * sum_i s_i gamma_i
  kAbsorbed    ///< sum_i s_i (E_m + alpha * gamma_i), exact since scores sum to 1
};

/// Whether the mask multiplies the task vectors (the paper) or the curved ones (the authors' public code).
enum class MaskOrder { kBeforeCurvature, kAfterCurvature };

/// What mixes into the merged weight of a unit. Source: Nguyen et al. 2025, CA-Merge (arXiv:2502.18821).
struct Mixture {
  Tensor terms_NOI;  ///< alpha * gamma_i, or E'_i in the absorbed form
  Tensor base_OI;    ///< E_m; undefined in the absorbed form, and where there is no base
};

/// gamma_i = M_i . (mask_i * (E_i - E_m)), or mask_i * (M_i . (E_i - E_m)), and what is mixed from it. Without curvature
/// the absorbed form is (1 - alpha mask_i) E_m + alpha mask_i E_i, entry by entry: at alpha = 1 an entry that all experts
/// keep gives the base exactly no gradient, where the other form would leave rounding noise that Adam blows up to full
/// steps.
/// @param base_OI    undefined: the soft merge of the experts, to which nothing else applies
/// @param curvature  null: identity
Mixture make_mixture(const Tensor& base_OI, const Tensor& experts_NOI, const EntryMask& mask,
                     const Curvature* curvature, double alpha, Form form,
                     MaskOrder order = MaskOrder::kBeforeCurvature,
                     CurvatureKernel kernel = CurvatureKernel::kAutomatic);

/// Merged weights of every unit, [U, O, I], by one product of scores [U, N] and terms [N, O * I].
Tensor merge_weights(const Mixture& mixture, const Tensor& scores_UN);

/// How a merged weight is multiplied with; all give the same numbers.
enum class Product {
  kAutomatic,   ///< in tiles where the tensors allow it, else merged first
  kTiled,       ///< merged tile by tile in the cache: float32 or float64 on the CPU
  kMerged,      ///< merged whole, then multiplied
  kActivations  ///< x E_m^T + sum_i s_i x gamma_i^T
};

/// y_u = x_u (merged weight of unit u)^T. Under autocast only this product is in less than float32.
/// @param x_UTI  @return [U, T, O]
Tensor merged_product(const Tensor& x_UTI, const Mixture& mixture, const Tensor& scores_UN, Product product);

/// Mean over the real tokens of each sentence. @param x_BTD  @param mask_BT  undefined: all are real  @return [B, D]
Tensor masked_mean(const Tensor& x_BTD, const Tensor& mask_BT);

struct MergedLinearOptions {
  std::int64_t num_experts;
  bool has_base = true;             ///< false: the soft merge of the experts
  double alpha = 1.0;
  Mask mask = {};                   ///< of the task vectors' entries; empty: keep all
  UnitMask unit_mask = {};          ///< of a unit's experts, while training; empty: keep all
  MaskOrder mask_order = MaskOrder::kBeforeCurvature;
  std::int64_t curvature_rank = 0;  ///< 0: no curvature
  RankInit rank_init = RankInit::kIdentityTotal;
  CurvatureKernel curvature_kernel = CurvatureKernel::kAutomatic;
  bool share_curvature = false;     ///< with the first layer of the same role
  double auxiliary_coefficient = 0.0;
  Form form = Form::kAutomatic;     ///< while training; evaluation folds (the absorbed form) unless this says kBase
  Product product = Product::kAutomatic;
  MakeRouter make_router = {};
  bool scores_sum_to_one = true;    ///< the router's, while training
  bool router_per_feed_forward = false;
  bool pool_padding = false;        ///< the mean that is routed counts padding too
  std::int64_t adapter_reduction = 0;  ///< of the token adapter in front; 0: none

  /// Whether sum_i s_i = 1 can be relied on while training.
  bool base_can_be_absorbed() const { return scores_sum_to_one && !unit_mask; }
};

/// A linear whose weight is merged from experts for each sentence (CAMEx, its baselines, and soft merging).
/// Parameters: weight [O, I] (the base expert E_m), experts [N, O, I], router.*, curvature.*, token_adapter.*. Where the
/// linear has a bias, also bias [O], bias_experts [N, O], bias_curvature.*, merged by the same scores and alpha, with a
/// mask of their own.
struct MergedLinear : ExpertLayer {
  /// Every expert starts as a copy of the dense linear.
  MergedLinear(const LayerPlace& place, const MergedLinearOptions& options);

  Tensor forward(const Tensor& x_BTI, nn::ForwardContext& context) override;
  void collect_backward(std::vector<Tensor>& roots, std::vector<Tensor>& gradients) override;
  /// The base expert, or the mean of the experts where there is none.
  Tensor dense_weight() const override;
  Tensor dense_bias() const override;
  void initialize(at::Generator& generator) override;
  ParameterCounts count() const override;
  LayerReport report() const override;

  Tensor weight, experts;      // weight: undefined without a base
  Tensor bias, bias_experts;   // undefined where the linear has no bias
  std::shared_ptr<Router> router;  // null where the first layer of the feed-forward routes
  std::shared_ptr<Curvature> curvature, bias_curvature;  // null without curvature
  std::shared_ptr<TokenAdapter> token_adapter;           // null without

  /// For tests: how often weights were merged since construction.
  std::int64_t num_merges = 0;

 private:
  void prepare(bool training, tensor::RandomStreams* random) override;
  Tensor route(const Tensor& x_BTI, nn::ForwardContext& context);
  /// [U, N] -> [U, O]
  Tensor merge_biases(const Tensor& scores_UN) const;

  MergedLinearOptions options_;
  std::shared_ptr<MergedLinear> routed_by_;  // null where this layer routes
  bool owns_curvature_ = false;
  Tensor pass_scores_UN_;  // of the pass that runs, for the layers that this one routes
  Form form_ = Form::kAutomatic;
  Mixture graph_;  // with its autograd history
  EntryMask bias_mask_;
  Mixture leaf_;   // what forward uses: gradients of all micro-batches add up at leaf_.terms_NOI
  double kept_fraction_ = 1.0;
  ScoreStatistics statistics_;
};

}  // namespace mergex::routing
