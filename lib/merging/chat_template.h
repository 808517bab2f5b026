#pragma once

#include "merging/plan.h"

namespace mergex::merging {

/// Gives the result the chat template that a recipe asks for, as chat_template.jinja in the place of the donor's.
/// @param choice  "auto": the one that most models have (the first of those that equally many have); a model of this
///                merge: its own; a text with "{": itself
/// @throws UserError for anything else, and where no model has one
void plan_chat_template(MergePlan& plan, const std::string& choice, const std::string& where);

}  // namespace mergex::merging
