#pragma once

#include <cstdint>
#include <optional>

#include "io/json_object.h"
#include "training/checkpoints.h"

namespace mergex::training {

/// `evaluation.early_stopping`: ends a run after `patience` evaluations in a row without a gain.
class EarlyStopping {
 public:
  /// Absent: never stops.
  static std::optional<EarlyStopping> read(io::JsonObject& evaluation);

  /// Takes note of an evaluation. A value gains when it is better than the best that gained by more than min_delta.
  void observe(double value, bool higher_is_better);
  bool should_stop() const { return waited_ >= patience_; }

  void save(TrainingState& state) const;
  void restore(const TrainingState& state);

 private:
  std::int64_t patience_ = 1;
  double min_delta_ = 0.0;
  std::optional<double> best_;
  std::int64_t waited_ = 0;
};

}  // namespace mergex::training
