#include "nn/relative_position.h"

#include <torch/torch.h>

#include <cmath>

namespace mergex::nn {

Tensor relative_position_bucket(const Tensor& relative_position, bool bidirectional, std::int64_t num_buckets,
                                std::int64_t max_distance) {
  auto bucket = torch::zeros_like(relative_position);
  Tensor distance;
  if (bidirectional) {
    num_buckets /= 2;
    bucket = (relative_position > 0).to(at::kLong) * num_buckets;
    distance = relative_position.abs();
  } else {
    distance = (-relative_position).clamp_min(0);
  }
  const auto max_exact = num_buckets / 2;
  // Float32 as in the checkpoints' own training: a wider type would move bucket borders.
  const auto scale = static_cast<float>(num_buckets - max_exact);
  const auto far = (torch::log(distance.clamp_min(1).to(at::kFloat) / static_cast<float>(max_exact)) /
                    std::log(static_cast<double>(max_distance) / static_cast<double>(max_exact)) * scale)
                       .to(at::kLong) +
                   max_exact;
  return bucket + torch::where(distance < max_exact, distance, far.clamp_max(num_buckets - 1));
}

}  // namespace mergex::nn
