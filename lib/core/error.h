#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace mergex {

/// What the user can fix: a recipe, a file, a command line. One line that says where, what was found, what was
/// expected and how to repair it. Anything else that is thrown is a fault of ours or of the machine.
class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A run that its own guard stopped (a loss that is not finite, failed rows of a sweep): exit code 3.
class GuardError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw UserError(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace mergex
