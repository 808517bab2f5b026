#pragma once

#include <string>

#include "merging/plan.h"

namespace mergex {

/// Every method with its parameters, what they mean, and the paper.
std::string method_list_text();
io::Json method_list_json();

/// What a merge would do: tensors in groups of one name (but for the layer), method, parameters and type; totals.
std::string plan_text(const merging::MergePlan& plan);
io::Json plan_json(const merging::MergePlan& plan);

/// Where the values of one tensor of the result come from.
/// @throws UserError with the nearest name when there is none of that name
std::string explain_text(const merging::MergePlan& plan, const std::string& tensor);

}  // namespace mergex
