#include "routing/expert_layer.h"

#include <torch/torch.h>

namespace mergex::routing {

void ScoreStatistics::add(const Tensor& scores_UN) {
  const torch::NoGradGuard no_grad;
  const auto s = scores_UN.detach().to(at::kDouble);
  const auto entropy = -torch::special::xlogy(s, s).sum();
  const auto experts = (s > 0).sum().to(at::kDouble);
  entropy_sum_ = units_ == 0 ? entropy : entropy_sum_ + entropy;
  expert_sum_ = units_ == 0 ? experts : expert_sum_ + experts;
  units_ += scores_UN.size(0);
}

double ScoreStatistics::mean_entropy() const {
  return units_ == 0 ? 0.0 : entropy_sum_.item<double>() / static_cast<double>(units_);
}

double ScoreStatistics::mean_experts() const {
  return units_ == 0 ? 0.0 : expert_sum_.item<double>() / static_cast<double>(units_);
}

void ExpertSet::begin(bool training, tensor::RandomStreams* random) {
  for (auto& place : places_) place.layer->begin(training, random);
}

void ExpertSet::finish_backward() {
  std::vector<Tensor> roots, gradients;
  for (auto& place : places_) place.layer->collect_backward(roots, gradients);
  if (!roots.empty()) torch::autograd::backward(roots, gradients);
}

ParameterCounts ExpertSet::count() const {
  ParameterCounts total;
  for (const auto& place : places_) {
    const auto c = place.layer->count();
    total.experts += c.experts;
    total.routers += c.routers;
    total.curvature += c.curvature;
  }
  return total;
}

LayerReport ExpertSet::report() const {
  LayerReport mean{.kept_fraction = 0.0};
  const auto share = 1.0 / static_cast<double>(places_.size());
  for (const auto& place : places_) {
    const auto r = place.layer->report();
    mean.task_vector_ratio += share * r.task_vector_ratio;
    mean.kept_fraction += share * r.kept_fraction;
    mean.router_entropy += share * r.router_entropy;
    mean.experts_per_unit += share * r.experts_per_unit;
  }
  return mean;
}

}  // namespace mergex::routing
