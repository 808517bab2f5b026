#pragma once

#include <optional>
#include <string>
#include <vector>

#include "training/optimizer.h"

namespace mergex::training {

/// One entry of `training.parameter_groups`: parameters that are trained in another way than the rest.
struct ParameterGroup {
  std::string pattern;  ///< of names, as in a shell: `*` any characters, `?` one, `[01]` one of these
  std::optional<double> learning_rate = {}, weight_decay = {};  ///< instead of the optimiser's
  bool frozen = false;
  std::string origin = {};  ///< where it stands, for messages
};

/// @param optimizer  a learning rate of a group needs one here
std::vector<ParameterGroup> read_parameter_groups(io::JsonObject& training, const OptimizerOptions& optimizer);

/// For each name the group that it falls into, the first that matches; absent: none.
/// @throws UserError for a group that takes no parameter (naming the nearest one), and where nothing would be trained
std::vector<std::optional<std::size_t>> match_groups(const std::vector<ParameterGroup>& groups,
                                                     const std::vector<std::string>& names);

/// The parameters that are trained, each with its rate and decay, in the order given.
std::vector<TrainedParameter> trained_parameters(const std::vector<std::pair<std::string, Tensor>>& parameters,
                                                 const OptimizerOptions& optimizer,
                                                 const std::vector<ParameterGroup>& groups);

/// Whether weight decay applies to a parameter of this name: not to biases (T5's relative position bias among them),
/// norms and curvature factors.
bool decays(const std::string& parameter);

}  // namespace mergex::training
