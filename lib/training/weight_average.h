#pragma once

#include <optional>
#include <span>
#include <vector>

#include "training/checkpoints.h"
#include "training/optimizer.h"

namespace mergex::training {

/// `training.ema`: an exponential moving average of the weights, which evaluations and checkpoints' models use.
/// average <- decay * average + (1 - decay) * weights after each step, starting from the initial weights.
class WeightAverage {
 public:
  WeightAverage(std::span<const TrainedParameter> parameters, double decay);

  void update();
  /// Exchanges the model's weights with their average; a second time puts them back.
  void swap();

  /// The weights themselves go into the training state, since the checkpoint's model holds the average.
  void save(TrainingState& state) const;
  /// With the average in the model.
  void restore(const TrainingState& state);

 private:
  std::span<const TrainedParameter> parameters_;
  std::vector<Tensor> average_;
  double decay_;
};

/// The average in the model's place while this object lives.
class AveragedWeights {
 public:
  explicit AveragedWeights(std::optional<WeightAverage>& average) : average_(average) {
    if (average_) average_->swap();
  }
  ~AveragedWeights() {
    if (average_) average_->swap();
  }
  AveragedWeights(const AveragedWeights&) = delete;
  AveragedWeights& operator=(const AveragedWeights&) = delete;

 private:
  std::optional<WeightAverage>& average_;
};

/// `training.ema.decay`; absent: no average.
std::optional<double> read_average_decay(io::JsonObject& training);

}  // namespace mergex::training
