#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace mergex::io {

/// A file mapped into memory for reading, for as long as this object lives. Nothing is read until it is looked at.
class MappedFile {
 public:
  /// @param kind  what was expected, for messages: "a safetensors file"
  /// @throws UserError "<file>: ..." when it is missing, no regular file or unreadable
  MappedFile(const std::filesystem::path& path, const char* kind);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace mergex::io
