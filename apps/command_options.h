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

  // mergex merge alone
  std::optional<std::string> explain;          ///< a tensor of the result
  std::vector<std::filesystem::path> compare;  ///< --diff: two checkpoints
  std::filesystem::path verify;                ///< a merged checkpoint
  std::uint64_t shard_bytes = 5'000'000'000, memory_bytes = 512ull << 20;
};

}  // namespace mergex

/// The one way into the shared library that links LibTorch. @return the exit code
/// @throws mergex::UserError, std::exception
extern "C" int mergex_engine_run(const mergex::CommandOptions* options);
