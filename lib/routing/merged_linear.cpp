#include "routing/merged_linear.h"

#include <torch/torch.h>

#include "routing/fused_curvature.h"
#include "routing/tiled_product.h"

namespace mergex::routing {

Mixture make_mixture(const Tensor& base_OI, const Tensor& experts_NOI, const Tensor& mask_NOI,
                     const Curvature* curvature, double alpha, Form form) {
  if (form == Form::kAutomatic) form = curvature == nullptr ? Form::kAbsorbed : Form::kBase;
  if (curvature == nullptr && form == Form::kAbsorbed) {
    if (mask_NOI.defined()) {
      const auto step_NOI = alpha * mask_NOI;
      return {step_NOI * experts_NOI + (1.0 - step_NOI) * base_OI, {}};
    }
    if (alpha == 1.0) return {experts_NOI, {}};
    return {(1.0 - alpha) * base_OI + alpha * experts_NOI, {}};
  }
  auto gamma_NOI = curvature != nullptr && can_fuse_curvature(experts_NOI) ? Tensor() : experts_NOI - base_OI;
  if (gamma_NOI.defined() && mask_NOI.defined()) gamma_NOI = gamma_NOI * mask_NOI;
  if (curvature != nullptr && can_fuse_curvature(experts_NOI)) {
    gamma_NOI = fused_curvature(experts_NOI, base_OI, {.before_NOI = mask_NOI.defined() ? mask_NOI != 0 : Tensor()}, alpha, curvature->c1_out, curvature->c2_out, curvature->c1_in, curvature->c2_in);
    if (form == Form::kAbsorbed) return {base_OI + gamma_NOI, {}};
    return {gamma_NOI, base_OI};
  }
  if (curvature != nullptr) gamma_NOI = curvature->forward(gamma_NOI);
  if (alpha != 1.0) gamma_NOI = alpha * gamma_NOI;
  if (form == Form::kAbsorbed) return {base_OI + gamma_NOI, {}};
  return {gamma_NOI, base_OI};
}

Tensor merge_weights(const Mixture& mixture, const Tensor& scores_UN) {
  const auto& terms = mixture.terms_NOI;
  const auto flat_NM = terms.reshape({terms.size(0), -1});
  const auto merged_UM = mixture.base_OI.defined()
                             ? torch::addmm(mixture.base_OI.reshape({1, -1}), scores_UN, flat_NM)
                             : torch::mm(scores_UN, flat_NM);
  return merged_UM.view({scores_UN.size(0), terms.size(1), terms.size(2)});
}

Tensor merged_product(const Tensor& x_UTI, const Mixture& mixture, const Tensor& scores_UN) {
  if (tensor::Autocast::current(x_UTI.device().type()) == at::kFloat && can_tile_product(x_UTI, mixture.terms_NOI)) {
    return tiled_product(x_UTI, mixture.terms_NOI, mixture.base_OI, scores_UN);
  }
  Tensor merged_UOI;
  {
    const tensor::NoAutocast own_dtype;
    merged_UOI = merge_weights(mixture, scores_UN);
  }
  return torch::bmm(x_UTI, merged_UOI.transpose(1, 2));
}

Tensor masked_mean(const Tensor& x_BTD, const Tensor& mask_BT) {
  if (!mask_BT.defined()) return x_BTD.mean(1);
  const auto weight_BT = mask_BT.to(x_BTD.scalar_type());
  const auto count_B1 = weight_BT.sum(1, /*keepdim=*/true).clamp_min(1);
  return torch::matmul(weight_BT.unsqueeze(1), x_BTD).squeeze(1) / count_B1;
}

MergedLinear::MergedLinear(const Tensor& dense_OI, const MergedLinearOptions& options)
    : weight(register_parameter("weight", dense_OI.detach().clone())),
      experts(register_parameter("experts", dense_OI.detach().repeat({options.num_experts, 1, 1}))),
      router(register_module("router",
                             options.make_router({dense_OI.size(1), options.num_experts,
                                                  options.auxiliary_coefficient,
                                                  dense_OI.options().requires_grad(false)}))),
      options_(options) {
  if (options.curvature_rank > 0) {
    curvature = register_module(
        "curvature", std::make_shared<Curvature>(options.curvature_rank, options.num_experts, dense_OI.size(0),
                                                 dense_OI.size(1), dense_OI.options().requires_grad(false)));
  }
}

void MergedLinear::initialize(at::Generator& generator) {
  router->initialize(generator);
  if (curvature) curvature->initialize();
}

void MergedLinear::prepare(bool training, tensor::RandomStreams* random) {
  const torch::AutoGradMode grad_mode(training);
  statistics_.reset();
  Tensor mask_NOI;
  if (options_.mask) {
    const torch::NoGradGuard no_grad;
    mask_NOI = options_.mask(experts - weight, training, random);
  }
  // Only a mask of 0 and 1 says what was kept; DARE's training mask is rescaled, and evaluation keeps all.
  kept_fraction_ = mask_NOI.defined() && !training ? mask_NOI.mean().item<double>() : 1.0;
  const auto form = options_.form == Form::kAutomatic && !training ? Form::kAbsorbed : options_.form;
  graph_ = make_mixture(weight, experts, mask_NOI, curvature.get(), options_.alpha, form);
  leaf_ = graph_;
  if (training && !graph_.terms_NOI.is_leaf()) leaf_.terms_NOI = graph_.terms_NOI.detach().requires_grad_(true);
}

void MergedLinear::collect_backward(std::vector<Tensor>& roots, std::vector<Tensor>& gradients) {
  if (graph_.terms_NOI.requires_grad() && !graph_.terms_NOI.is_leaf() && leaf_.terms_NOI.grad().defined()) {
    roots.push_back(graph_.terms_NOI);
    gradients.push_back(leaf_.terms_NOI.grad());
  }
  graph_ = leaf_ = {};
}

Tensor MergedLinear::forward(const Tensor& x_BTI, nn::ForwardContext& context) {
  TORCH_CHECK(leaf_.terms_NOI.defined(), "begin() must be called before a step or an evaluation");
  Tensor scores_UN;
  {
    const tensor::NoAutocast own_dtype;  // only the product with the merged weight may be in less
    const auto wide = at::promote_types(x_BTI.scalar_type(), at::kFloat);
    const auto routed = router->forward(masked_mean(x_BTI.to(wide), context.mask_BT), context);
    if (routed.auxiliary_loss.defined()) context.auxiliary_losses.push_back(routed.auxiliary_loss);
    if (!context.training) statistics_.add(routed.scores_UN);
    ++num_merges;
    scores_UN = routed.scores_UN;
  }
  return merged_product(x_BTI, leaf_, scores_UN);
}

ParameterCounts MergedLinear::count() const {
  ParameterCounts c{.experts = experts.numel()};
  for (const auto& p : router->parameters()) c.routers += p.numel();
  if (curvature) {
    for (const auto& p : curvature->parameters()) c.curvature += p.numel();
  }
  return c;
}

LayerReport MergedLinear::report() const {
  const torch::NoGradGuard no_grad;
  const auto tau_norms = (experts - weight).flatten(1).norm(2, 1);
  return {.task_vector_ratio = (tau_norms.mean() / weight.norm()).item<double>(),
          .kept_fraction = kept_fraction_,
          .router_entropy = statistics_.mean_entropy(),
          .experts_per_unit = statistics_.mean_experts()};
}

}  // namespace mergex::routing
