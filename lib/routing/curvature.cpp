#include "routing/curvature.h"

#include <torch/torch.h>

#include <cmath>

namespace mergex::routing {

std::pair<std::int64_t, std::int64_t> factor_pair(std::int64_t width) {
  auto a = static_cast<std::int64_t>(std::sqrt(static_cast<double>(width)));
  while (width % a != 0) --a;
  return {a, width / a};
}

Tensor apply_curvature(const Tensor& tau_NOI, const Tensor& c1_out, const Tensor& c2_out, const Tensor& c1_in,
                       const Tensor& c2_in) {
  const auto n = tau_NOI.size(0), o = tau_NOI.size(1), i = tau_NOI.size(2);
  const auto a1 = c1_out.size(-1), a2 = c2_out.size(-1), b1 = c1_in.size(-1), b2 = c2_in.size(-1);
  Tensor sum_NOI;
  for (std::int64_t r = 0; r < c1_out.size(0); ++r) {
    // One factor a product, each over its own axis of [N, A1, A2, B1, B2].
    auto u = torch::matmul(c1_out[r], tau_NOI.reshape({n, a1, a2 * i}));
    u = torch::matmul(c2_out[r].unsqueeze(1), u.view({n, a1, a2, i}));
    u = torch::matmul(c1_in[r].unsqueeze(1), u.view({n, o, b1, b2}));
    u = torch::matmul(u.view({n, o * b1, b2}), c2_in[r].transpose(-1, -2)).view({n, o, i});
    sum_NOI = sum_NOI.defined() ? sum_NOI + u : u;
  }
  return sum_NOI;
}

Curvature::Curvature(std::int64_t rank, std::int64_t num_experts, std::int64_t out_features,
                     std::optional<std::int64_t> in_features, const at::TensorOptions& tensors) {
  const auto add = [&](const char* name, std::int64_t w) {
    return register_parameter(name, torch::empty({rank, num_experts, w, w}, tensors));
  };
  const auto [a1, a2] = factor_pair(out_features);
  c1_out = add("c1_out", a1);
  c2_out = add("c2_out", a2);
  if (!in_features) return;
  const auto [b1, b2] = factor_pair(*in_features);
  c1_in = add("c1_in", b1);
  c2_in = add("c2_in", b2);
}

void Curvature::initialize(RankInit init) {
  const torch::NoGradGuard no_grad;
  for (auto* c : {&c1_out, &c2_out, &c1_in, &c2_in}) {
    if (c->defined()) c->copy_(torch::eye(c->size(-1), c->options()).expand_as(*c));
  }
  if (init == RankInit::kIdentityTotal && c1_out.size(0) > 1) c1_out.slice(0, 1).zero_();
}

Tensor Curvature::in_factor(const Tensor& c) const {
  if (c.defined()) return c;
  return torch::ones({c1_out.size(0), c1_out.size(1), 1, 1}, c1_out.options().requires_grad(false));
}

Tensor Curvature::forward(const Tensor& tau_NOI) const {
  return apply_curvature(tau_NOI, c1_out, c2_out, in_factor(c1_in), in_factor(c2_in));
}

Tensor Curvature::curved_task_vectors(const Tensor& experts_NOI, const Tensor& base_OI, const CurvatureMasks& masks,
                                      double scale, CurvatureKernel kernel) const {
  if (kernel == CurvatureKernel::kAutomatic) {
    kernel = can_fuse_curvature(experts_NOI) ? CurvatureKernel::kFused : CurvatureKernel::kContraction;
  }
  if (kernel == CurvatureKernel::kFused) {
    TORCH_CHECK(can_fuse_curvature(experts_NOI), "the fused curvature is for float32 and float64 on the CPU");
    return fused_curvature(experts_NOI, base_OI, masks, scale, c1_out, c2_out, in_factor(c1_in), in_factor(c2_in));
  }
  auto tau_NOI = experts_NOI - base_OI;
  if (masks.before_NOI.defined()) tau_NOI = tau_NOI * masks.before_NOI;
  if (scale != 1.0) tau_NOI = scale * tau_NOI;
  const auto gamma_NOI = forward(tau_NOI);
  return masks.after_NOI.defined() ? gamma_NOI * masks.after_NOI : gamma_NOI;
}

}  // namespace mergex::routing
