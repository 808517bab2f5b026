#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/json.h"
#include "merging/plan.h"

namespace mergex::merging {

inline constexpr std::string_view kManifestFile = "manifest.json";

/// The files that a merge reads, as they were when it began.
class InputFiles {
 public:
  /// Reads headers and descriptions, no tensor.
  explicit InputFiles(const MergePlan& plan);

  /// @throws UserError when a file has another size or date by now
  void check_unchanged() const;
  /// Everything that tells them from other files, dates included.
  io::Json identity() const;
  /// Files of a model, without what differs between copies of it.
  io::Json files_of_model(std::size_t model) const;

 private:
  struct File {
    std::filesystem::path path;
    std::uint64_t num_bytes = 0;
    std::int64_t modified_ns = 0;
    std::string
        header_sha256;  ///< of weights: what stands before (.bin: behind) the values; otherwise of the whole file
  };
  static File look_at(const std::filesystem::path& path);

  std::vector<std::vector<File>> of_models_;
  std::vector<File> others_;
};

/// Tensor of an input -> its digest.
using InputDigests = std::unordered_map<const io::TensorView*, std::string>;

/// A file of the result.
struct OutputFile {
  std::string name;  ///< relative
  std::uint64_t num_bytes = 0;
  std::string sha256 = {};  ///< empty for weights, which have digests of their tensors:
  std::vector<std::pair<std::string, std::string>> tensors = {};  ///< name, digest
};

/// Which program made what from what: names, sizes and digests of everything, and the recipe.
io::Json make_manifest(const std::string& version, const MergePlan& plan, const InputFiles& inputs,
                       const InputDigests& digests, const std::vector<OutputFile>& files);

}  // namespace mergex::merging
