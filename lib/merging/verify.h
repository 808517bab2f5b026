#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace mergex::merging {

/// What a merged folder is compared with its manifest by.
struct Verification {
  std::size_t num_tensors = 0, num_files = 0;  ///< that the manifest names
  std::uint64_t num_bytes = 0;                 ///< of tensors that were hashed
  std::vector<std::string> problems = {};      ///< a line for each damaged, missing or foreign tensor and file

  bool is_intact() const { return problems.empty(); }
  std::string text() const;
};

/// Hashes everything in the folder again. @throws UserError where there is no manifest to compare with
Verification verify(const std::filesystem::path& folder, std::size_t num_threads);

}  // namespace mergex::merging
