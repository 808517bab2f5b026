#pragma once

#include <string>

#include "merging/plan.h"

namespace mergex::merging {

/// README.md of the result: a Hugging Face model card that says which models were merged how, and no more.
std::string model_card(const MergePlan& plan);

}  // namespace mergex::merging
