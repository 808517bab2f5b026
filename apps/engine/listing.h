#pragma once

namespace mergex::engine {

/// `mergex finetune --list`: everything that a recipe can name. @return the exit code
int print_list();

}  // namespace mergex::engine
