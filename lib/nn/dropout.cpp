#include "nn/forward_context.h"

#include <torch/torch.h>

namespace mergex::nn {

Tensor dropout(const Tensor& x, double p, ForwardContext& context) {
  if (!context.training || p == 0.0) return x;
  TORCH_CHECK(context.random != nullptr, "dropout needs the run's random streams");
  // at::dropout takes no generator.
  auto keep = torch::empty_like(x, x.options().requires_grad(false));
  keep.bernoulli_(1.0 - p, context.random->stream("dropout")).div_(1.0 - p);
  return x * keep;
}

}  // namespace mergex::nn
