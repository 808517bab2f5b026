#include "training/precision.h"

#include <torch/torch.h>

#include "training/gradients.h"

namespace mergex::training {

at::ScalarType read_precision(io::JsonObject& training) {
  const std::vector<std::string> names{"float32", "bfloat16", "float16"};
  constexpr at::ScalarType kTypes[]{at::kFloat, at::kBFloat16, at::kHalf};
  return kTypes[training.choice("precision", names, 0)];
}

Tensor LossScale::scaled(const Tensor& loss) const { return active_ ? loss * scale_ : loss; }

void LossScale::unscale(std::span<const TrainedParameter> parameters) const {
  if (active_) scale_gradients(parameters, 1.0 / scale_);
}

bool LossScale::overflowed(bool gradients_are_finite) {
  constexpr std::int64_t kGrowthInterval = 2000;
  if (!active_) return false;
  if (gradients_are_finite) {
    if (++good_steps_ < kGrowthInterval) return false;
    scale_ *= 2.0;
    good_steps_ = 0;
    return false;
  }
  good_steps_ = 0;
  if (scale_ <= 1.0) return false;
  scale_ /= 2.0;
  return true;
}

void LossScale::save(TrainingState& state) const {
  if (active_) state.values["loss_scale"] = {{"scale", scale_}, {"good_steps", good_steps_}};
}

void LossScale::restore(const TrainingState& state) {
  if (!active_) return;
  const auto& v = state.values.at("loss_scale");
  scale_ = v.at("scale");
  good_steps_ = v.at("good_steps");
}

}  // namespace mergex::training
