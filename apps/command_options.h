#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace mergex {

/// A command line, parsed. What it means is the subcommand's.
struct CommandOptions {
  std::string subcommand;
  std::filesystem::path recipe;
  std::vector<std::string> sets;
  std::optional<std::filesystem::path> out;
  std::optional<std::int64_t> seed;
  std::string device = "auto";
  std::int64_t threads = 0;  ///< 0: all cores
  bool resume = false, overwrite = false, json = false, dry_run = false, list = false;
  int verbosity = 0;  ///< -1 quiet, 1 verbose
};

}  // namespace mergex

/// The one way into the shared library that links LibTorch. @return the exit code
/// @throws mergex::UserError, std::exception
extern "C" int mergex_engine_run(const mergex::CommandOptions* options);
