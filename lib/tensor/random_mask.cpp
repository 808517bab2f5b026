#include "tensor/random_mask.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace mergex::tensor {

RandomMask draw_mask(at::IntArrayRef sizes, double p, at::Device device, at::Generator& generator) {
  // bernoulli_ draws one number an entry, one after another: half of a small model's time. Here four entries share one.
  const auto entries = c10::multiply_integers(sizes);
  const auto kept = std::clamp<std::int64_t>(std::llround((1.0 - p) * 65536.0), 1, 65536);
  if (kept == 65536) return {torch::ones(sizes, at::TensorOptions(at::kBool).device(device)), 1.0};
  auto bits = torch::empty({(entries + 3) / 4}, at::TensorOptions(at::kLong).device(device));
  bits.random_(std::numeric_limits<std::int64_t>::min(), std::nullopt, generator);
  return {bits.view(at::kShort).slice(0, 0, entries).view(sizes) < kept - 32768, 65536.0 / static_cast<double>(kept)};
}

}  // namespace mergex::tensor
