#pragma once

#include <string>
#include <string_view>

namespace mergex {

/// Text of a file as a message can show it: control characters, line ends among them, as \n, \t or \x1B.
std::string one_line(std::string_view text);

}  // namespace mergex
