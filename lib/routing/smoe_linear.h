#pragma once

#include "routing/expert_layer.h"
#include "routing/router.h"

namespace mergex::routing {

// T tokens, N experts, O out_features, I in_features

/// y_t = sum over the experts that a token's scores select of s_i (W_i x_t + b_i). Each expert multiplies only its
/// tokens.
/// @param x_TI  @param experts_NOI  @param scores_TN  zero where an expert is not selected
/// @param biases_NO  undefined: none  @return [T, O]
Tensor mix_outputs(const Tensor& x_TI, const Tensor& experts_NOI, const Tensor& scores_TN,
                   const Tensor& biases_NO = {});

struct SmoeLinearOptions {
  std::int64_t num_experts;
  double auxiliary_coefficient = 0.01;
  MakeRouter make_router;
};

/// Sparse mixture of experts by token (Shazeer et al. 2017, arXiv:1701.06538), in place of one linear.
/// Parameters: experts [N, O, I], bias_experts [N, O] where the linear has a bias, router.*; there is no base expert.
/// Padding is neither routed nor counted.
struct SmoeLinear : ExpertLayer {
  SmoeLinear(const LayerPlace& place, const SmoeLinearOptions& options);

  Tensor forward(const Tensor& x_BTI, nn::ForwardContext& context) override;
  void collect_backward(std::vector<Tensor>&, std::vector<Tensor>&) override {}
  /// The mean of the experts.
  Tensor dense_weight() const override { return experts.mean(0); }
  Tensor dense_bias() const override { return bias_experts.defined() ? bias_experts.mean(0) : Tensor(); }
  void initialize(at::Generator& generator) override { router->initialize(generator); }
  ParameterCounts count() const override;
  /// Task vectors are taken from the mean of the experts.
  LayerReport report() const override;

  Tensor experts, bias_experts;
  std::shared_ptr<Router> router;

 private:
  void prepare(bool, tensor::RandomStreams*) override { statistics_.reset(); }

  ScoreStatistics statistics_;
};

}  // namespace mergex::routing
