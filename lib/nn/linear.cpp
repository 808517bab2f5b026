#include "nn/linear.h"

#include <torch/torch.h>

namespace mergex::nn {

Linear::Linear(std::int64_t in_features, std::int64_t out_features, const at::TensorOptions& options, bool has_bias)
    : weight(register_parameter("weight", torch::empty({out_features, in_features}, options))) {
  if (has_bias) bias = register_parameter("bias", torch::empty({out_features}, options));
}

Tensor Linear::forward(const Tensor& x, ForwardContext&) { return torch::linear(x, weight, bias); }

RmsNorm::RmsNorm(std::int64_t size, double epsilon_, const at::TensorOptions& options)
    : weight(register_parameter("weight", torch::empty({size}, options))), epsilon(epsilon_) {}

Tensor RmsNorm::forward(const Tensor& x) {
  const auto wide = at::promote_types(x.scalar_type(), at::kFloat);
  const auto x_wide = x.to(wide);
  const auto variance = x_wide.square().mean(-1, /*keepdim=*/true);
  return (x_wide * torch::rsqrt(variance + epsilon)).to(x.scalar_type()) * weight;
}

}  // namespace mergex::nn
