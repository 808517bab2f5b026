#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "io/json_object.h"
#include "training/checkpoints.h"
#include "training/optimizer.h"

namespace mergex::training {

/// `training.precision`: what matrix products are computed in; float32 leaves the model's own dtype. Parameters,
/// optimiser, norms, softmax, losses, routing, merges and curvature keep theirs.
at::ScalarType read_precision(io::JsonObject& training);

/// Keeps small gradients above float16's smallest number: the loss is multiplied by a scale, the gradients divided by
/// it. A gradient that overflows halves the scale, and 2,000 steps without one double it. Inactive but for float16.
/// Source: Micikevicius et al. 2018, section 3.2 (arXiv:1710.03740).
class LossScale {
 public:
  explicit LossScale(at::ScalarType precision) : active_(precision == at::kHalf) {}

  Tensor scaled(const Tensor& loss) const;
  void unscale(std::span<const TrainedParameter> parameters) const;
  /// @return whether this step is to be skipped; false also where the scale cannot help any more
  bool overflowed(bool gradients_are_finite);

  void save(TrainingState& state) const;
  void restore(const TrainingState& state);

 private:
  bool active_;
  double scale_ = 65536.0;
  std::int64_t good_steps_ = 0;
};

}  // namespace mergex::training
