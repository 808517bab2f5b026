#include "training/weight_average.h"

#include <torch/torch.h>

namespace mergex::training {

WeightAverage::WeightAverage(std::span<const TrainedParameter> parameters, double decay)
    : parameters_(parameters), decay_(decay) {
  for (const auto& p : parameters_) average_.push_back(p.value.detach().clone());
}

void WeightAverage::update() {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < average_.size(); ++i) average_[i].lerp_(parameters_[i].value, 1.0 - decay_);
}

void WeightAverage::swap() {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < average_.size(); ++i) {
    auto value = parameters_[i].value;
    const auto weights = value.clone();
    value.copy_(average_[i]);
    average_[i].copy_(weights);
  }
}

void WeightAverage::save(TrainingState& state) const {
  for (const auto& p : parameters_) state.tensors.emplace("weights." + p.name, p.value);
}

void WeightAverage::restore(const TrainingState& state) {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < average_.size(); ++i) {
    auto value = parameters_[i].value;
    average_[i].copy_(value);
    value.copy_(state.tensors.at("weights." + parameters_[i].name));
  }
}

std::optional<double> read_average_decay(io::JsonObject& training) {
  auto options = training.object("ema");
  if (!options) return std::nullopt;
  const auto decay = options->required<double>("decay", {.at_least = 0.0, .below = 1.0});
  options->finish();
  return decay;
}

}  // namespace mergex::training
