#pragma once

#include "command_options.h"

namespace mergex {

/// `mergex merge`: plans and makes a merge, or prints its plan; compares and verifies checkpoints. Loads no LibTorch.
/// @return the exit code
int run_merge(const CommandOptions& options);

}  // namespace mergex
