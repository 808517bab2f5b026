#pragma once

#include <string>
#include <variant>

#include "command_options.h"

namespace mergex {

/// A parsed command line, or a text that was asked for (help, version) and belongs on stdout.
/// @throws UserError for anything that does not parse
std::variant<CommandOptions, std::string> parse_command_line(int argc, const char* const* argv);

}  // namespace mergex
