#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "io/json.h"
#include "io/safetensors.h"
#include "io/torch_file.h"

namespace mergex::io {

/// A Hugging Face checkpoint: config.json beside model.safetensors, or beside model.safetensors.index.json and the
/// shards that it names; where there is neither, pytorch_model.bin or its index and shards. Tensors of several shards
/// read like those of one file.
class CheckpointFolder {
 public:
  /// Opens and checks every file, without touching the values. An index and its shards must list the same tensors, but
  /// for names that models tie to another tensor (`aliases`); a folder with an index and a single file is an error,
  /// unless the index is of that file.
  /// @throws UserError that says what is missing and how to get it
  explicit CheckpointFolder(std::filesystem::path folder);

  const std::filesystem::path& path() const { return path_; }
  const Json& config() const { return config_; }
  /// Shard by shard (by name), in the order of their bytes.
  std::vector<const TensorView*> tensors() const;
  /// nullptr when there is none of that name.
  const TensorView* find(std::string_view name) const;
  /// "folder/shard" that holds the tensor, for messages; the folder alone for a name that is not here.
  std::string file_of(std::string_view tensor) const;
  /// Where in that file the bytes of one of tensors() begin.
  std::uint64_t offset_of(std::string_view tensor) const;
  /// Config, index where there is one, and shards: what to hash to know that two checkpoints are the same.
  std::vector<std::filesystem::path> files() const;
  /// Names that are another tensor by the model's definition and are not among tensors(): listed in an index but not
  /// stored (T5's encoder.embed_tokens.weight), or stored in a .bin as the same bytes. Name -> the tensor that it is.
  const std::map<std::string, std::string>& aliases() const { return aliases_; }
  /// Weight files of the same format in the folder that are not read, perhaps left by an older run; names, sorted.
  std::vector<std::string> unused_files() const;

 private:
  using WeightFile = std::variant<SafetensorsFile, TorchFile>;
  struct Location {
    std::size_t shard;
    const TensorView* tensor;
  };

  static const std::vector<TensorView>& tensors_of(const WeightFile& file);
  static const std::filesystem::path& path_of(const WeightFile& file);
  void open_weights(const std::string& single, const std::string& index_name);
  /// The stored tensor that a model uses under this other name; nullptr where no such rule is known.
  const TensorView* original_of(std::string_view name) const;
  void find_shared_storages();

  std::filesystem::path path_;
  Json config_;
  std::vector<std::filesystem::path> descriptions_;  // config.json, and the index
  std::vector<WeightFile> shards_;
  std::unordered_map<std::string_view, Location> index_;  // keys lie in shards_
  std::map<std::string, std::string> aliases_;
};

/// A merge computes with 16, 32 or 64 bit numbers: refuses checkpoints whose weights are quantised (GPTQ, AWQ,
/// bitsandbytes, compressed tensors). @throws UserError in one line
void check_not_quantised(const CheckpointFolder& folder);

}  // namespace mergex::io
