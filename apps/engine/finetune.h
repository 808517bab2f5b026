#pragma once

#include "command_options.h"

namespace mergex::engine {

/// `mergex finetune`: one run, or the rows of a sweep and their joint table. @return the exit code
int finetune(const CommandOptions& options);

}  // namespace mergex::engine
