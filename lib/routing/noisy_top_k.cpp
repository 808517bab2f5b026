#include "routing/noisy_top_k.h"

#include <torch/torch.h>

#include <cmath>
#include <limits>

namespace mergex::routing {
namespace {

constexpr double kInitialStd = 0.02;

struct NoisyTopKRouter : Router {
  NoisyTopKRouter(const RouterShape& shape, std::int64_t top_k_, double noise_std_floor_)
      : w_gate(register_parameter("w_gate", torch::empty({shape.in_features, shape.num_experts}, shape.tensors))),
        w_noise(register_parameter("w_noise", torch::empty({shape.in_features, shape.num_experts}, shape.tensors))),
        top_k(top_k_),
        noise_std_floor(noise_std_floor_),
        auxiliary_coefficient(shape.auxiliary_coefficient) {}

  RouterOutput forward(const Tensor& z_UD, nn::ForwardContext& context) override {
    Tensor noise_UN;
    if (context.training) {
      noise_UN = torch::empty({z_UD.size(0), w_gate.size(1)}, z_UD.options().requires_grad(false));
      noise_UN.normal_(0.0, 1.0, context.random->stream("router_noise"));
    }
    const auto gating = noisy_top_k(z_UD, w_gate, w_noise, noise_UN, top_k, noise_std_floor);
    return {gating.scores_UN,
            auxiliary_coefficient > 0 ? balance_loss(gating, auxiliary_coefficient) : Tensor()};
  }

  void initialize(at::Generator& generator) override {
    const torch::NoGradGuard no_grad;
    for (auto* w : {&w_gate, &w_noise}) {
      w->copy_(torch::empty(w->sizes(), at::kFloat).normal_(0.0, kInitialStd, generator));
    }
  }

  Tensor w_gate, w_noise;  // [D, N]
  std::int64_t top_k;
  double noise_std_floor, auxiliary_coefficient;
};

}  // namespace

Gating noisy_top_k(const Tensor& h_UD, const Tensor& w_gate_DN, const Tensor& w_noise_DN, const Tensor& noise_UN,
                   std::int64_t top_k, double noise_std_floor) {
  const auto num_experts = w_gate_DN.size(1);
  const auto clean_UN = torch::matmul(h_UD, w_gate_DN);
  Tensor sigma_UN, logits_UN = clean_UN;
  if (noise_UN.defined()) {
    sigma_UN = torch::softplus(torch::matmul(h_UD, w_noise_DN)) + noise_std_floor;
    logits_UN = clean_UN + sigma_UN * noise_UN;
  }
  if (top_k == num_experts) {
    const auto scores_UN = torch::softmax(logits_UN, -1);
    return {scores_UN, scores_UN.sum(0), (scores_UN > 0).sum(0).to(scores_UN.scalar_type())};
  }

  // topk breaks ties arbitrarily; a stable sort gives them to the lower index.
  const auto [sorted_UN, order_UN] = torch::sort(logits_UN, /*stable=*/true, /*dim=*/-1, /*descending=*/true);
  const auto kept_UN = torch::zeros_like(logits_UN, at::kBool).scatter_(1, order_UN.slice(1, 0, top_k), true);
  const auto scores_UN =
      torch::softmax(logits_UN.masked_fill(~kept_UN, -std::numeric_limits<double>::infinity()), -1);

  Tensor load_N;
  if (noise_UN.defined()) {
    // Chance to stay among (or enter) the k largest if this expert's noise were drawn again: compare with the k-th
    // largest of the others.
    const auto threshold_if_in = sorted_UN.slice(1, top_k, top_k + 1);
    const auto threshold_if_out = sorted_UN.slice(1, top_k - 1, top_k);
    const auto z_UN = (clean_UN - torch::where(kept_UN, threshold_if_in, threshold_if_out)) / sigma_UN;
    load_N = (0.5 * (1.0 + torch::erf(z_UN / std::sqrt(2.0)))).sum(0);
  } else {
    load_N = (scores_UN > 0).sum(0).to(scores_UN.scalar_type());
  }
  return {scores_UN, scores_UN.sum(0), load_N};
}

Tensor cv_squared(const Tensor& v_N) {
  if (v_N.numel() < 2) return torch::zeros({}, v_N.options());
  return v_N.var() / (v_N.mean().square() + 1e-10);
}

Tensor balance_loss(const Gating& gating, double coefficient) {
  return coefficient * (cv_squared(gating.importance_N) + cv_squared(gating.load_N));
}

constinit const RouterKind kNoisyTopK{
    .name = "noisy_top_k",
    .summary = "softmax over the k largest of linear logits, with learned noise while training",
    .paper = "Shazeer et al. 2017, arXiv:1701.06538",
    .has_balance_loss = true,
    .configure = [](io::JsonObject& options, std::int64_t num_experts, std::int64_t default_top_k) -> ConfiguredRouter {
      std::int64_t top_k = default_top_k;
      options.optional("top_k", top_k);
      if (top_k < 1 || top_k > num_experts) {
        options.fail_value("top_k", fmt::format("expected 1..{} (num_experts is {}); lower top_k or add experts",
                                                num_experts, num_experts));
      }
      double floor = 0.01;
      options.optional("noise_std_floor", floor, {.at_least = 0.0});
      return {.make = [top_k, floor](const RouterShape& shape) {
                return std::make_shared<NoisyTopKRouter>(shape, top_k, floor);
              },
              .top_k = top_k};
    }};

}  // namespace mergex::routing
