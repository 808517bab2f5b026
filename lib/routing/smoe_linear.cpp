#include "routing/smoe_linear.h"

#include <torch/torch.h>

namespace mergex::routing {

Tensor mix_outputs(const Tensor& x_TI, const Tensor& experts_NOI, const Tensor& scores_TN, const Tensor& biases_NO) {
  const auto wide = at::promote_types(x_TI.scalar_type(), scores_TN.scalar_type());  // differ in mixed precision
  auto y_TO = torch::zeros({x_TI.size(0), experts_NOI.size(1)}, x_TI.options().dtype(wide).requires_grad(false));
  for (std::int64_t i = 0; i < experts_NOI.size(0); ++i) {
    const auto score_T = scores_TN.select(1, i);
    const auto tokens = torch::nonzero(score_T.detach()).squeeze(1);
    if (tokens.numel() == 0) continue;
    const auto out = torch::linear(x_TI.index_select(0, tokens), experts_NOI[i],
                                   biases_NO.defined() ? biases_NO[i] : Tensor());
    y_TO = y_TO.index_add(0, tokens, out * score_T.index_select(0, tokens).unsqueeze(1));
  }
  return y_TO;
}

SmoeLinear::SmoeLinear(const LayerPlace& place, const SmoeLinearOptions& options)
    : experts(register_parameter("experts", place.weight_OI.detach().repeat({options.num_experts, 1, 1}))),
      router(register_module("router", options.make_router({place.weight_OI.size(1), options.num_experts,
                                                            options.auxiliary_coefficient,
                                                            place.weight_OI.options().requires_grad(false)}))) {
  if (place.bias_O.defined()) {
    bias_experts = register_parameter("bias_experts", place.bias_O.detach().repeat({options.num_experts, 1}));
  }
}

Tensor SmoeLinear::forward(const Tensor& x_BTI, nn::ForwardContext& context) {
  const auto flat = x_BTI.reshape({-1, x_BTI.size(-1)});
  Tensor real;
  if (context.mask_BT.defined()) real = torch::nonzero(context.mask_BT.reshape(-1)).squeeze(1);
  const auto x_TI = real.defined() ? flat.index_select(0, real) : flat;
  const auto routed = [&] {
    const tensor::NoAutocast own_dtype;
    return router->forward(x_TI.to(at::promote_types(x_TI.scalar_type(), at::kFloat)), context);
  }();
  if (routed.auxiliary_loss.defined()) context.auxiliary_losses.push_back(routed.auxiliary_loss);
  if (!context.training) statistics_.add(routed.scores_UN);
  auto y = mix_outputs(x_TI, experts, routed.scores_UN, bias_experts);
  if (real.defined()) {
    y = torch::zeros({flat.size(0), y.size(1)}, y.options().requires_grad(false)).index_copy(0, real, y);
  }
  return y.view({x_BTI.size(0), x_BTI.size(1), -1});
}

ParameterCounts SmoeLinear::count() const {
  // One expert stands in the dense model's own place.
  ParameterCounts c{.experts = experts.numel() - experts[0].numel()};
  if (bias_experts.defined()) c.experts += bias_experts.numel() - bias_experts[0].numel();
  for (const auto& p : router->parameters()) c.routers += p.numel();
  return c;
}

LayerReport SmoeLinear::report() const {
  const torch::NoGradGuard no_grad;
  const auto mean = experts.mean(0);
  return {.task_vector_ratio = ((experts - mean).flatten(1).norm(2, 1).mean() / mean.norm()).item<double>(),
          .router_entropy = statistics_.mean_entropy(),
          .experts_per_unit = statistics_.mean_experts()};
}

}  // namespace mergex::routing
