#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/json_object.h"
#include "tensor/tensor.h"

namespace mergex::training {

/// A parameter and how it is trained.
struct TrainedParameter {
  std::string name;
  Tensor value;
  double learning_rate = 0.0;  ///< at the peak of the schedule
  double weight_decay = 0.0;
};

/// What turns gradients into updates. A parameter without a gradient is left alone.
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  /// One update of every parameter that has a gradient.
  /// @param factor  the schedule's, on each parameter's learning rate
  /// @return        the learning rate taken by the parameters that are in no group, for the log
  virtual double step(double factor) = 0;

  /// "<parameter>.<what>" of each parameter that was updated before.
  virtual std::map<std::string, Tensor> state() const = 0;
  /// Takes over what `state()` gave, here or in another process.
  virtual void restore(const std::map<std::string, Tensor>& state) = 0;
};

using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(std::vector<TrainedParameter>)>;

/// An optimiser as recipes name it.
struct OptimizerKind {
  const char* name;
  const char* summary;
  const char* paper;
  bool has_own_rate;  ///< can do without `learning_rate`
  /// Reads the options that are this optimiser's own.
  /// @param learning_rate  the recipe's; absent only where `has_own_rate`
  MakeOptimizer (*configure)(io::JsonObject& options, std::optional<double> learning_rate);
};

std::span<const OptimizerKind* const> optimizer_registry();

extern const OptimizerKind kAdamW, kAdafactor;

/// What the recipe's `training.optimizer` section asks for.
struct OptimizerOptions {
  std::string name;
  std::optional<double> learning_rate;  ///< at the peak of the schedule; absent: the optimiser's own
  double weight_decay = 0.0;
  MakeOptimizer make;

  /// @throws UserError for unknown names (with the nearest one), missing values and values out of range
  static OptimizerOptions read(io::JsonObject options);
};

}  // namespace mergex::training
