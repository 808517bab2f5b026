#pragma once

#include <span>

#include "training/optimizer.h"

namespace mergex::training {

void zero_gradients(std::span<const TrainedParameter> parameters);

/// Multiplies all gradients.
void scale_gradients(std::span<const TrainedParameter> parameters, double factor);

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)). @return the norm before; max_norm 0: measured only
double clip_gradients(std::span<const TrainedParameter> parameters, double max_norm);

}  // namespace mergex::training
