#pragma once

#include <filesystem>
#include <memory>
#include <vector>

#include "io/mapped_file.h"
#include "io/safetensors.h"

namespace mergex::io {

/// A state dict as torch.save writes it (pytorch_model.bin), mapped into memory for as long as this object lives.
///
/// Nothing of the file is executed: of pickle, the instructions that build dicts, tuples, texts and numbers are
/// understood, and of Python's functions those that put a tensor together from its storage. Everything else is
/// refused by name. Format: zip archive, not compressed, of data.pkl and one file per storage (torch/serialization.py).
class TorchFile {
 public:
  /// Reads the description of the tensors; their values are not touched.
  /// @throws UserError "<file>: ..." in one line, with the tensor's name where it is about one
  static TorchFile open(const std::filesystem::path& path);

  /// In the order of the state dict. Tensors that share a storage (tied ones) share their bytes.
  const std::vector<TensorView>& tensors() const { return tensors_; }
  const std::filesystem::path& path() const { return path_; }
  /// The whole file.
  std::span<const std::byte> bytes() const { return mapping_->bytes(); }

 private:
  TorchFile() = default;
  void parse();

  std::filesystem::path path_;
  std::unique_ptr<MappedFile> mapping_;
  std::vector<TensorView> tensors_;
};

}  // namespace mergex::io
