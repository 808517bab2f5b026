#include "routing/token_adapter.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>

namespace mergex::routing {
namespace {

std::shared_ptr<nn::Linear> biased(std::int64_t in, std::int64_t out, const at::TensorOptions& tensors) {
  return std::make_shared<nn::Linear>(in, out, tensors, /*has_bias=*/true);
}

}  // namespace

TokenAdapter::TokenAdapter(std::int64_t width, std::int64_t reduction, const at::TensorOptions& tensors)
    : down(register_module("down", biased(width, std::max<std::int64_t>(1, width / reduction), tensors))),
      up(register_module("up", biased(down->weight.size(0), width, tensors))) {}

Tensor TokenAdapter::forward(const Tensor& x, nn::ForwardContext& context) {
  return x + up->forward(torch::relu(down->forward(x, context)), context);
}

void TokenAdapter::initialize(at::Generator& generator) {
  const torch::NoGradGuard no_grad;
  const double bound = 1.0 / std::sqrt(static_cast<double>(down->weight.size(1)));
  down->weight.copy_(torch::empty(down->weight.sizes(), at::kFloat).uniform_(-bound, bound, generator));
  down->bias.zero_();
  up->weight.zero_();
  up->bias.zero_();
}

}  // namespace mergex::routing
