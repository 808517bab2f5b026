#pragma once

#include <span>

#include "tasks/task.h"

namespace mergex::tasks {

/// All tasks, in the order of the help.
std::span<const TaskEntry* const> registry();

/// Reads a recipe's `task` section: `name` chooses the entry, which reads the rest.
/// @throws UserError for an unknown name or option
Task read_task(io::JsonObject section);

}  // namespace mergex::tasks
