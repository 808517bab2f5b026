#pragma once

#include "tasks/task.h"

namespace mergex::tasks {

/// T5's language-model task on plain text, one document per line. Only the reading is here.
extern const TaskEntry kSpanCorruption;

}  // namespace mergex::tasks
