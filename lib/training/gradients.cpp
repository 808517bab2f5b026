#include "training/gradients.h"

#include <torch/torch.h>

namespace mergex::training {
namespace {

std::vector<Tensor> gradients_of(std::span<const TrainedParameter> parameters) {
  std::vector<Tensor> gradients;
  for (const auto& p : parameters) {
    if (p.value.grad().defined()) gradients.push_back(p.value.grad());
  }
  return gradients;
}

}  // namespace

void zero_gradients(std::span<const TrainedParameter> parameters) {
  for (const auto& p : parameters) p.value.mutable_grad() = Tensor();
}

void scale_gradients(std::span<const TrainedParameter> parameters, double factor) {
  const torch::NoGradGuard no_grad;
  const auto gradients = gradients_of(parameters);
  if (!gradients.empty()) at::_foreach_mul_(gradients, factor);
}

double clip_gradients(std::span<const TrainedParameter> parameters, double max_norm) {
  const torch::NoGradGuard no_grad;
  const auto gradients = gradients_of(parameters);
  if (gradients.empty()) return 0.0;
  const auto norm = torch::stack(at::_foreach_norm(gradients, 2)).norm().item<double>();
  if (max_norm > 0.0) {
    const auto scale = std::min(1.0, max_norm / (norm + 1e-6));
    if (scale < 1.0) at::_foreach_mul_(gradients, scale);
  }
  return norm;
}

}  // namespace mergex::training
