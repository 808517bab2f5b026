#include "routing/smear.h"

#include <torch/torch.h>

namespace mergex::routing {
namespace {

constexpr double kInitialStd = 0.02;
// The gain of the norm over the router's weights is what sets their size, and with it how sharp the first scores are.
constexpr double kInitialGateGain = 0.01;

/// Gain and bias of a layer norm.
struct Norm : torch::nn::Module {
  Norm(std::int64_t size, const at::TensorOptions& tensors)
      : weight(register_parameter("weight", torch::empty({size}, tensors))),
        bias(register_parameter("bias", torch::empty({size}, tensors))) {}
  Tensor weight, bias;
};

struct SmearRouter : Router {
  SmearRouter(const RouterShape& shape, double expert_dropout_, bool renormalize_)
      : w_gate(register_parameter("w_gate", torch::empty({shape.in_features, shape.num_experts}, shape.tensors))),
        input_norm(register_module("input_norm", std::make_shared<Norm>(shape.in_features, shape.tensors))),
        gate_norm(register_module("gate_norm", std::make_shared<Norm>(shape.in_features, shape.tensors))),
        expert_dropout(expert_dropout_),
        renormalize(renormalize_) {}

  RouterOutput forward(const Tensor& z_UD, nn::ForwardContext& context) override {
    auto scores_UN = normalized_scores(z_UD, w_gate, input_norm->weight, input_norm->bias, gate_norm->weight,
                                       gate_norm->bias);
    if (context.training && expert_dropout > 0.0) {
      auto kept_UN = torch::empty_like(scores_UN, scores_UN.options().requires_grad(false));
      kept_UN.bernoulli_(1.0 - expert_dropout, context.random->stream("expert_dropout"));
      scores_UN = drop_experts(scores_UN, kept_UN, renormalize);
    }
    return {scores_UN, {}};
  }

  void initialize(at::Generator& generator) override {
    const torch::NoGradGuard no_grad;
    w_gate.copy_(torch::empty(w_gate.sizes(), at::kFloat).normal_(0.0, kInitialStd, generator));
    input_norm->weight.fill_(1.0);
    gate_norm->weight.fill_(kInitialGateGain);
    input_norm->bias.zero_();
    gate_norm->bias.zero_();
  }

  Tensor w_gate;  // [D, N]
  std::shared_ptr<Norm> input_norm, gate_norm;
  double expert_dropout;
  bool renormalize;
};

}  // namespace

Tensor normalized_scores(const Tensor& z_UD, const Tensor& w_gate_DN, const Tensor& input_gain_D,
                         const Tensor& input_bias_D, const Tensor& gate_gain_D, const Tensor& gate_bias_D) {
  const auto size = w_gate_DN.size(0);
  const auto z = torch::layer_norm(z_UD, {size}, input_gain_D, input_bias_D);
  const auto w_ND = torch::layer_norm(w_gate_DN.t(), {size}, gate_gain_D, gate_bias_D);
  return torch::softmax(torch::matmul(z, w_ND.t()), -1);
}

Tensor drop_experts(const Tensor& scores_UN, const Tensor& kept_UN, bool renormalize) {
  const auto left_UN = scores_UN * kept_UN;
  if (!renormalize) return left_UN;
  const auto uniform = 1.0 / static_cast<double>(scores_UN.size(1));
  const auto sum_U1 = left_UN.sum(1, /*keepdim=*/true);
  const auto is_empty_U1 = sum_U1 == 0;
  // The division is kept finite where its result is not used, for the gradient's sake.
  return torch::where(is_empty_U1, torch::full_like(left_UN, uniform), left_UN / sum_U1.masked_fill(is_empty_U1, 1.0));
}

constinit const RouterKind kSmear{
    .name = "smear",
    .summary = "softmax of linear logits, input and router weights layer-normalised; can drop experts while training",
    .paper = "Muqeeth et al. 2023, arXiv:2306.03745",
    .has_balance_loss = false,
    .configure = [](io::JsonObject& options, std::int64_t num_experts, std::int64_t) -> ConfiguredRouter {
      double dropout = 0.0;
      bool renormalize = true;
      options.optional("expert_dropout", dropout, {.at_least = 0.0, .below = 1.0});
      options.optional("renormalize", renormalize);
      return {.make = [dropout, renormalize](const RouterShape& shape) {
                return std::make_shared<SmearRouter>(shape, dropout, renormalize);
              },
              .top_k = num_experts,
              .scores_sum_to_one = dropout == 0.0 || renormalize};
    }};

}  // namespace mergex::routing
