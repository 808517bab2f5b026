#pragma once

#include "command_options.h"

namespace mergex {

/// Loads the shared library that links LibTorch, which lies beside the program (or in ../lib of it), and runs a
/// subcommand in it. Programs that do not call this do not pay for LibTorch. @return the exit code
int run_in_engine(const CommandOptions& options);

}  // namespace mergex
