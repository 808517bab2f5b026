#include "training/parameter_groups.h"

#include <fnmatch.h>

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace mergex::training {
namespace {

bool matches(const ParameterGroup& group, const std::string& name) {
  return ::fnmatch(group.pattern.c_str(), name.c_str(), 0) == 0;
}

/// How many characters of the pattern would have to change for it to match: an edit distance in which `*` is free.
std::size_t distance(const std::string& pattern, const std::string& name) {
  std::vector<std::size_t> row(name.size() + 1);  // of the pattern so far, to each beginning of the name
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (const char wanted : pattern) {
    auto diagonal = row[0];
    if (wanted != '*') ++row[0];
    for (std::size_t i = 1; i < row.size(); ++i) {
      const auto above = row[i];
      const bool is_equal = wanted == '?' || wanted == name[i - 1];
      row[i] = wanted == '*' ? std::min(above, row[i - 1])
                             : std::min({diagonal + (is_equal ? 0 : 1), above + 1, row[i - 1] + 1});
      diagonal = above;
    }
  }
  return row.back();
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
    const auto& nearest =
        *std::ranges::min_element(names, {}, [&](const auto& name) { return distance(groups[g].pattern, name); });
    fail("{}/pattern: got \"{}\", which matches no parameter; the nearest is \"{}\" (* stands for any characters)",
         groups[g].origin, groups[g].pattern, nearest);
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
