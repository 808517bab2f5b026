#pragma once

#include "tasks/task.h"

namespace mergex::tasks {

// The user's own tables: TSV, CSV or JSON Lines, by their ending, plain or gzip.
extern const TaskEntry kClassification, kRegression;

}  // namespace mergex::tasks
