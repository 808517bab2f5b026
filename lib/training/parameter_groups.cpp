#include "training/parameter_groups.h"

#include <fnmatch.h>

#include <algorithm>

#include "core/error.h"
#include "core/suggest.h"

namespace mergex::training {
namespace {

bool matches(const ParameterGroup& group, const std::string& name) {
  return ::fnmatch(group.pattern.c_str(), name.c_str(), 0) == 0;
}

/// The name that the pattern, its wildcards left out, has the least to change for.
std::string nearest_name(std::string pattern, const std::vector<std::string>& names) {
  std::erase(pattern, '*');
  return *std::ranges::min_element(names, {}, [&](const std::string& name) { return edit_distance(pattern, name); });
}

}  // namespace

std::vector<ParameterGroup> read_parameter_groups(io::JsonObject& training, const OptimizerOptions& optimizer) {
  std::vector<ParameterGroup> groups;
  for (auto& options : training.objects("parameter_groups")) {
    ParameterGroup group{.pattern = options.required<std::string>("pattern"), .origin = options.where()};
    group.learning_rate = options.maybe<double>("learning_rate", {.at_least = 0.0, .at_most = 10.0});
    group.weight_decay = options.maybe<double>("weight_decay", {.at_least = 0.0});
    options.optional("frozen", group.frozen);
    if (group.frozen && (group.learning_rate || group.weight_decay)) {
      options.fail_value("frozen", "but a learning rate or weight decay is given too; keep one");
    }
    if (group.learning_rate && !optimizer.learning_rate) {
      options.fail_value("learning_rate", "but the optimizer chooses its own (relative_step); remove one");
    }
    options.finish();
    groups.push_back(std::move(group));
  }
  return groups;
}

std::vector<std::optional<std::size_t>> match_groups(const std::vector<ParameterGroup>& groups,
                                                     const std::vector<std::string>& names) {
  std::vector<std::optional<std::size_t>> result(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto found = std::ranges::find_if(groups, [&](const auto& group) { return matches(group, names[i]); });
    if (found != groups.end()) result[i] = static_cast<std::size_t>(found - groups.begin());
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (std::ranges::find(result, std::optional(g)) != result.end()) continue;
    const bool is_late = std::ranges::any_of(names, [&](const auto& name) { return matches(groups[g], name); });
    if (is_late) {
      fail("{}/pattern: got \"{}\", whose parameters all belong to an earlier group; put it before that one",
           groups[g].origin, groups[g].pattern);
    }
    fail("{}/pattern: got \"{}\", which matches no parameter; the nearest is \"{}\" (* stands for any characters)",
         groups[g].origin, groups[g].pattern, nearest_name(groups[g].pattern, names));
  }
  if (std::ranges::all_of(result, [&](const auto& group) { return group && groups[*group].frozen; })) {
    fail("{}: every parameter is frozen; leave one to train", groups.back().origin);
  }
  return result;
}

std::vector<TrainedParameter> trained_parameters(const std::vector<std::pair<std::string, Tensor>>& parameters,
                                                 const OptimizerOptions& optimizer,
                                                 const std::vector<ParameterGroup>& groups) {
  std::vector<std::string> names;
  for (const auto& [name, value] : parameters) names.push_back(name);
  const auto group_of = match_groups(groups, names);
  std::vector<TrainedParameter> trained;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto group = group_of[i] ? groups[*group_of[i]] : ParameterGroup{};
    if (group.frozen) continue;
    trained.push_back({.name = names[i],
                       .value = parameters[i].second,
                       .learning_rate = group.learning_rate.value_or(optimizer.learning_rate.value_or(0.0)),
                       .weight_decay = decays(names[i]) ? group.weight_decay.value_or(optimizer.weight_decay) : 0.0});
  }
  return trained;
}

bool decays(const std::string& parameter) {
  return parameter.find("bias") == std::string::npos && !parameter.ends_with("norm.weight") &&
         parameter.find(".curvature.") == std::string::npos;
}

}  // namespace mergex::training
