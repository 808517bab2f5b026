#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "nn/forward_context.h"

namespace mergex::nn {

Tensor dropout(const Tensor& x, double p, ForwardContext& context) {
  if (!context.training || p == 0.0) return x;
  TORCH_CHECK(context.random != nullptr, "dropout needs the run's random streams");
  // at::dropout takes no generator, and bernoulli_ draws one number an entry, one after another: half of a small
  // model's time. Sixteen random bits an entry decide as well, and four entries share one draw. The probability is a
  // multiple of 2^-16; the scale is that multiple's own, so that the expectation stays exact.
  const auto entries = x.numel();
  auto bits = torch::empty({(entries + 3) / 4}, x.options().dtype(at::kLong).requires_grad(false));
  bits.random_(std::numeric_limits<std::int64_t>::min(), std::nullopt, context.random->stream("dropout"));
  const auto kept = std::clamp<std::int64_t>(std::llround((1.0 - p) * 65536.0), 1, 65535);
  const auto keep = (bits.view(at::kShort).slice(0, 0, entries).view(x.sizes()) < kept - 32768).to(x.scalar_type());
  return x * keep.mul_(65536.0 / static_cast<double>(kept));
}

}  // namespace mergex::nn
