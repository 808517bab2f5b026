#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/mapped_file.h"

namespace mergex::io {

enum class DType { kBool, kU8, kI8, kU16, kI16, kF16, kBF16, kU32, kI32, kF32, kU64, kI64, kF64 };

/// "F32", "BF16", ... as safetensors spells it.
std::string_view dtype_name(DType dtype);
/// Bytes of one element.
std::size_t dtype_size(DType dtype);
std::optional<DType> parse_dtype(std::string_view name);

/// A named array in somebody else's memory, row major, little endian. The bytes of a file need not be aligned.
struct TensorView {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;  // empty: a scalar
  std::span<const std::byte> bytes;

  std::int64_t num_elements() const { return static_cast<std::int64_t>(bytes.size() / dtype_size(dtype)); }
};

/// `[768, 32]`
std::string shape_text(std::span<const std::int64_t> shape);

/// A safetensors file, mapped into memory for as long as this object lives; views stay valid when it is moved.
/// Format: 8 bytes header length, JSON header, data without holes (huggingface/safetensors, format description).
class SafetensorsFile {
 public:
  /// Checks the whole header before it returns: names, types, shapes, and that the tensors cover the data exactly.
  /// @throws UserError "<file>: ..." in one line, with the tensor's name where it is about one
  static SafetensorsFile open(const std::filesystem::path& path);

  /// In the order of their bytes.
  const std::vector<TensorView>& tensors() const { return tensors_; }
  /// nullptr when there is none of that name.
  const TensorView* find(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::filesystem::path& path() const { return path_; }
  /// The whole file, header included.
  std::span<const std::byte> bytes() const { return mapping_->bytes(); }

 private:
  SafetensorsFile() = default;
  void parse();

  std::filesystem::path path_;
  std::unique_ptr<MappedFile> mapping_;
  std::vector<TensorView> tensors_;
  std::unordered_map<std::string_view, std::size_t> index_;  // keys lie in tensors_
  std::map<std::string, std::string> metadata_;
};

/// What a header says of one tensor.
struct TensorHeader {
  std::string_view name;
  DType dtype = DType::kF32;
  std::span<const std::int64_t> shape = {};
};

/// The bytes of a file before its data, which holds these tensors in this order. Its size is a multiple of 8.
/// @throws std::invalid_argument for a name that is taken twice, sizes that overflow, a header of more than 100 MB
std::string safetensors_header(std::span<const TensorHeader> tensors, const std::map<std::string, std::string>& metadata);

/// Writes the same bytes as the reference implementation for the same tensors, in whatever order they are given:
/// by type (wide ones first), then by name. The file appears whole or not at all.
/// @throws std::invalid_argument when a view contradicts itself or a name is taken twice; std::system_error
void write_safetensors(const std::filesystem::path& path, std::span<const TensorView> tensors,
                       const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

}  // namespace mergex::io
