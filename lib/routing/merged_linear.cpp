#include "routing/merged_linear.h"

#include <torch/torch.h>

#include "routing/tiled_product.h"
#include "tensor/autocast.h"

namespace mergex::routing {

Mixture make_mixture(const Tensor& base_OI, const Tensor& experts_NOI, const EntryMask& mask,
                     const Curvature* curvature, double alpha, Form form, MaskOrder order, CurvatureKernel kernel) {
  if (!base_OI.defined()) return {experts_NOI, {}};
  if (form == Form::kAutomatic) form = curvature == nullptr ? Form::kAbsorbed : Form::kBase;
  const auto step = alpha * mask.scale;
  if (curvature == nullptr && form == Form::kAbsorbed) {
    const auto moved_NOI = step == 1.0 ? experts_NOI : (1.0 - step) * base_OI + step * experts_NOI;
    return {mask.keep_NOI.defined() ? torch::where(mask.keep_NOI, moved_NOI, base_OI) : moved_NOI, {}};
  }
  Tensor gamma_NOI;
  if (curvature != nullptr) {
    const bool before = order == MaskOrder::kBeforeCurvature;
    gamma_NOI = curvature->curved_task_vectors(
        experts_NOI, base_OI, {before ? mask.keep_NOI : Tensor(), before ? Tensor() : mask.keep_NOI}, step, kernel);
  } else {
    gamma_NOI = experts_NOI - base_OI;
    if (mask.keep_NOI.defined()) gamma_NOI = gamma_NOI * mask.keep_NOI;
    if (step != 1.0) gamma_NOI = step * gamma_NOI;
  }
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

Tensor merged_product(const Tensor& x_UTI, const Mixture& mixture, const Tensor& scores_UN, Product product) {
  const bool autocast = tensor::Autocast::current(x_UTI.device().type()) != at::kFloat;
  if (product == Product::kAutomatic) {
    product = !autocast && can_tile_product(x_UTI, mixture.terms_NOI) ? Product::kTiled : Product::kMerged;
  }
  switch (product) {
    case Product::kTiled:
      TORCH_CHECK(!autocast && can_tile_product(x_UTI, mixture.terms_NOI),
                  "products in tiles are for float32 and float64 on the CPU, without autocast");
      return tiled_product(x_UTI, mixture.terms_NOI, mixture.base_OI, scores_UN);
    case Product::kActivations: {
      auto y_UTO = mixture.base_OI.defined() ? torch::linear(x_UTI, mixture.base_OI) : Tensor();
      for (std::int64_t i = 0; i < scores_UN.size(1); ++i) {
        const auto share = scores_UN.select(1, i).view({-1, 1, 1}) * torch::linear(x_UTI, mixture.terms_NOI[i]);
        y_UTO = y_UTO.defined() ? y_UTO + share : share;
      }
      return y_UTO;
    }
    default: break;
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

MergedLinear::MergedLinear(const LayerPlace& place, const MergedLinearOptions& options) : options_(options) {
  const auto& dense_OI = place.weight_OI;
  const auto n = options.num_experts;
  const auto tensors = dense_OI.options().requires_grad(false);
  if (options.has_base) weight = register_parameter("weight", dense_OI.detach().clone());
  experts = register_parameter("experts", dense_OI.detach().repeat({n, 1, 1}));
  if (place.bias_O.defined()) {
    if (options.has_base) bias = register_parameter("bias", place.bias_O.detach().clone());
    bias_experts = register_parameter("bias_experts", place.bias_O.detach().repeat({n, 1}));
  }

  if (options.router_per_feed_forward) {
    routed_by_ = std::dynamic_pointer_cast<MergedLinear>(place.first_of_feed_forward);
  }
  if (!routed_by_) {
    router = register_module("router",
                             options.make_router({dense_OI.size(1), n, options.auxiliary_coefficient, tensors}));
  }
  if (options.adapter_reduction > 0) {
    token_adapter = register_module(
        "token_adapter", std::make_shared<TokenAdapter>(dense_OI.size(1), options.adapter_reduction, tensors));
  }

  if (options.curvature_rank == 0) return;
  if (options.share_curvature && place.first_of_role) {
    // Not registered here: the model must have each of its parameters once.
    const auto first = std::dynamic_pointer_cast<MergedLinear>(place.first_of_role);
    curvature = first->curvature;
    bias_curvature = first->bias_curvature;
    return;
  }
  owns_curvature_ = true;
  curvature = register_module("curvature", std::make_shared<Curvature>(options.curvature_rank, n, dense_OI.size(0),
                                                                       dense_OI.size(1), tensors));
  if (bias_experts.defined()) {
    bias_curvature = register_module(
        "bias_curvature",
        std::make_shared<Curvature>(options.curvature_rank, n, dense_OI.size(0), std::nullopt, tensors));
  }
}

void MergedLinear::initialize(at::Generator& generator) {
  if (router) router->initialize(generator);
  if (token_adapter) token_adapter->initialize(generator);
  if (!owns_curvature_) return;
  curvature->initialize(options_.rank_init);
  if (bias_curvature) bias_curvature->initialize(options_.rank_init);
}

Tensor MergedLinear::dense_weight() const { return weight.defined() ? weight : experts.mean(0); }

Tensor MergedLinear::dense_bias() const {
  return bias.defined() || !bias_experts.defined() ? bias : bias_experts.mean(0);
}

void MergedLinear::prepare(bool training, tensor::RandomStreams* random) {
  const torch::AutoGradMode grad_mode(training);
  statistics_.reset();
  pass_scores_UN_ = Tensor();
  EntryMask mask;
  if (options_.mask) {
    const torch::NoGradGuard no_grad;
    mask = options_.mask(experts, weight, training, random);
    if (bias.defined()) bias_mask_ = options_.mask(bias_experts.unsqueeze(-1), bias.unsqueeze(-1), training, random);
  }
  // A mask that is drawn for training says nothing of the evaluated model, which keeps all.
  kept_fraction_ = mask.keep_NOI.defined() && !training
                       ? mask.keep_NOI.sum().item<double>() / static_cast<double>(mask.keep_NOI.numel())
                       : 1.0;
  form_ = options_.form;
  if (form_ == Form::kAutomatic && !training) form_ = Form::kAbsorbed;
  if (form_ == Form::kAutomatic && !options_.base_can_be_absorbed()) form_ = Form::kBase;
  graph_ = make_mixture(weight, experts, mask, curvature.get(), options_.alpha, form_, options_.mask_order,
                        options_.curvature_kernel);
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

Tensor MergedLinear::route(const Tensor& x_BTI, nn::ForwardContext& context) {
  if (routed_by_) {
    const auto& scores_UN = routed_by_->pass_scores_UN_;
    TORCH_CHECK(scores_UN.defined() && scores_UN.size(0) == x_BTI.size(0),
                "the layer that routes this one has not run");
    return scores_UN;
  }
  const tensor::NoAutocast own_dtype;  // only the product with the merged weight may be in less
  const auto wide = at::promote_types(x_BTI.scalar_type(), at::kFloat);
  const auto mask_BT = options_.pool_padding ? Tensor() : context.mask_BT;
  const auto routed = router->forward(masked_mean(x_BTI.to(wide), mask_BT), context);
  if (routed.auxiliary_loss.defined()) context.auxiliary_losses.push_back(routed.auxiliary_loss);
  if (options_.router_per_feed_forward) pass_scores_UN_ = routed.scores_UN;
  return routed.scores_UN;
}

Tensor MergedLinear::merge_biases(const Tensor& scores_UN) const {
  const tensor::NoAutocast own_dtype;
  // Small enough to be mixed in every pass: its gradients flow to the parameters at once.
  const auto base_O1 = bias.defined() ? bias.unsqueeze(-1) : Tensor();
  const auto mixture = make_mixture(base_O1, bias_experts.unsqueeze(-1), bias_mask_, bias_curvature.get(),
                                    options_.alpha, form_, options_.mask_order, options_.curvature_kernel);
  return merge_weights(mixture, scores_UN).squeeze(-1);
}

Tensor MergedLinear::forward(const Tensor& x_BTI, nn::ForwardContext& context) {
  TORCH_CHECK(leaf_.terms_NOI.defined(), "begin() must be called before a step or an evaluation");
  const auto adapted_BTI = token_adapter ? token_adapter->forward(x_BTI, context) : x_BTI;
  auto scores_UN = route(adapted_BTI, context);
  if (!context.training) statistics_.add(scores_UN);
  if (options_.unit_mask && context.training) scores_UN = scores_UN * options_.unit_mask(scores_UN, *context.random);
  ++num_merges;
  const auto y_BTO = merged_product(adapted_BTI, leaf_, scores_UN, options_.product);
  return bias_experts.defined() ? y_BTO + merge_biases(scores_UN).unsqueeze(1) : y_BTO;
}

ParameterCounts MergedLinear::count() const {
  // Without a base one expert stands in the dense model's own place.
  const auto beside_dense = [&](const Tensor& t) { return t.numel() - (options_.has_base ? 0 : t[0].numel()); };
  const auto sum = [](const torch::nn::Module& module) {
    std::int64_t total = 0;
    for (const auto& p : module.parameters()) total += p.numel();
    return total;
  };
  ParameterCounts c{.experts = beside_dense(experts)};
  if (bias_experts.defined()) c.experts += beside_dense(bias_experts);
  if (router) c.routers += sum(*router);
  if (token_adapter) c.routers += sum(*token_adapter);
  if (owns_curvature_) c.curvature += sum(*curvature) + (bias_curvature ? sum(*bias_curvature) : 0);
  return c;
}

LayerReport MergedLinear::report() const {
  const torch::NoGradGuard no_grad;
  const auto center = dense_weight();
  const auto tau_norms = (experts - center).flatten(1).norm(2, 1);
  return {.task_vector_ratio = (tau_norms.mean() / center.norm()).item<double>(),
          .kept_fraction = kept_fraction_,
          .router_entropy = statistics_.mean_entropy(),
          .experts_per_unit = statistics_.mean_experts()};
}

}  // namespace mergex::routing
