#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace mergex::test {

/// What a program did.
struct Outcome {
  int exit_code = -1;  ///< 128 + the signal where one ended it, as a shell has it
  int signal = 0;      ///< the one that ended it, 0: it exited by itself
  std::string out, err;
  double wall_s = 0.0;  ///< from start to end, of the whole process
};

/// A signal sent to a program while it runs.
struct Interruption {
  int signal;
  double after_s = 0.0;  ///< since the start
  /// Sent as soon as this holds, too; polled without a pause, with what was written until now. Empty: always.
  std::function<bool(const Outcome&)> when = {};
};

/// Runs a program to its end, without a shell, with an empty stdin. After `timeout_s` it is killed and the test fails.
Outcome run_process(const std::filesystem::path& program, const std::vector<std::string>& arguments,
                    const std::optional<Interruption>& interruption = std::nullopt,
                    const std::filesystem::path& working_directory = ".", double timeout_s = 300.0);

}  // namespace mergex::test
