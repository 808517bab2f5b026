#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include "merging/output_folder.h"
#include "merging/plan.h"

namespace mergex::merging {

struct ExecuteOptions {
  std::filesystem::path out;
  std::uint64_t shard_bytes = 5'000'000'000;
  /// Bounds buffers, histograms and what methods keep; mapped inputs and the cache of files are not counted.
  std::uint64_t memory_bytes = std::uint64_t{512} << 20;
  std::size_t threads = 1;
  bool resume = false, overwrite = false;
  std::string version = "";  ///< of the program, for the manifest
  /// Bytes of the result: done, of all. From one thread at a time.
  std::function<void(std::uint64_t done, std::uint64_t total, std::string_view tensor)> progress = {};
};

struct Executed {
  std::uint64_t bytes = 0;  ///< of tensors
  double seconds = 0.0;
};

/// Carries out a plan: `options.out` appears whole or not at all, with config and other files, merge_report.json,
/// manifest.json, a model card and timing.json. Apart from the last, bytes do not depend on threads, memory, or on
/// interruptions in between. After a stop or a fault of the machine, finished groups of tensors stay in `OUT.partial`
/// for `resume`; errors of the user leave nothing.
/// @throws UserError, std::system_error (a full disk is found before the work), Interrupted
Executed execute(const MergePlan& plan, const ExecuteOptions& options);

}  // namespace mergex::merging
