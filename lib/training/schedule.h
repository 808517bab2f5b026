#pragma once

#include <cstdint>
#include <string>

#include "io/json_object.h"

namespace mergex::training {

/// Learning rate over the steps of a run, as a factor on the peak.
struct Schedule {
  enum class Kind { kLinear, kCosine, kConstant } kind = Kind::kLinear;
  std::int64_t warmup_steps = 0;
  double warmup_ratio = 0.0;  ///< of all steps, rounded up; used where warmup_steps is not given

  /// Reads `training.schedule`.
  static Schedule read(io::JsonObject options);

  /// Warm-up rises from 0 at step 0; "linear" then falls to 0 at `num_steps`, and "cosine" as half a cosine does.
  /// @param step  from 0
  double factor(std::int64_t step, std::int64_t num_steps) const;
  std::int64_t warmup(std::int64_t num_steps) const;
};

}  // namespace mergex::training
