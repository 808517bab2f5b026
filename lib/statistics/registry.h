#pragma once

#include <span>
#include <string_view>

#include "statistics/metrics.h"

namespace mergex::statistics {

/// Every metric, in the order of help.
std::span<const Metric* const> metrics();

/// @param where  put before the message ("recipe.json#/evaluation/select_best_by"); may be empty
/// @throws UserError `<where>: got "acuracy", no such metric; did you mean "accuracy"?`
const Metric& find_metric(std::string_view name, std::string_view where = {});

}  // namespace mergex::statistics
