#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/json.h"
#include "io/safetensors.h"

namespace mergex::io {

/// A Hugging Face checkpoint: config.json beside model.safetensors, or beside model.safetensors.index.json and the
/// shards that it names. Tensors of several shards read like those of one file.
class CheckpointFolder {
 public:
  /// Opens and checks every file. @throws UserError that says what is missing and how to get it
  explicit CheckpointFolder(std::filesystem::path folder);

  const std::filesystem::path& path() const { return path_; }
  const Json& config() const { return config_; }
  /// Shard by shard (by name), in the order of their bytes.
  std::vector<const TensorView*> tensors() const;
  /// nullptr when there is none of that name.
  const TensorView* find(std::string_view name) const;
  /// "folder/shard" that holds the tensor, for messages; the folder alone for a name that is not here.
  std::string file_of(std::string_view tensor) const;
  /// Config, index where there is one, and shards: what to hash to know that two checkpoints are the same.
  std::vector<std::filesystem::path> files() const;

 private:
  struct Location {
    std::size_t shard;
    const TensorView* tensor;
  };

  std::filesystem::path path_;
  Json config_;
  std::vector<std::filesystem::path> descriptions_;  // config.json, and the index
  std::vector<SafetensorsFile> shards_;
  std::unordered_map<std::string_view, Location> index_;  // keys lie in shards_
};

}  // namespace mergex::io
