#include <torch/torch.h>

#include "nn/forward_context.h"
#include "tensor/random_mask.h"

namespace mergex::nn {

Tensor dropout(const Tensor& x, double p, ForwardContext& context) {
  if (!context.training || p == 0.0) return x;
  TORCH_CHECK(context.random != nullptr, "dropout needs the run's random streams");
  const auto mask = tensor::draw_mask(x.sizes(), p, x.device(), context.random->stream("dropout"));
  // In less than float32 the scale itself would be rounded: 1.109 for 1.111 in bfloat16.
  if (x.element_size() < 4) return x * mask.keep * mask.scale;
  return x * mask.keep.to(x.scalar_type()).mul_(mask.scale);
}

}  // namespace mergex::nn
