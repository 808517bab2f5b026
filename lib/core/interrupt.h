#pragma once

#include <atomic>
#include <stdexcept>
#include <string>

namespace mergex {

/// Thrown where a loop finds that the user asked the run to stop; carries the exit code (130 or 143).
class Interrupted : public std::runtime_error {
 public:
  explicit Interrupted(int signal);
  int exit_code() const { return 128 + signal_; }

 private:
  int signal_;
};

/// The number of the signal that asked for a stop, 0 before. A second signal ends the process at once.
std::atomic<int>& stop_signal();

/// Ctrl-C and SIGTERM set `stop_signal()` from now on.
void install_signal_handlers();

/// Polled in every loop that can take long.
void throw_if_interrupted();

}  // namespace mergex
