#pragma once

#include "io/json_object.h"

namespace mergex::merging {

/// A mergekit configuration as a recipe of ours: its keys go into `merge`, `merge_method` is `method` there, filters are
/// substrings and rows beyond the tokens are cut, as mergekit has it. Other keys keep their names, so that messages point
/// to what the user wrote.
/// @throws UserError when it is no mergekit configuration
io::JsonDocument recipe_from_mergekit(const io::JsonDocument& yaml);

}  // namespace mergex::merging
