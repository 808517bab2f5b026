#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

namespace mergex::io {

/// The files of a zip archive that lies in memory, which must outlive this. Those that are compressed or encrypted are
/// an error when they are asked for. Format: PKWARE APPNOTE 6.3 with zip64.
class ZipArchive {
 public:
  struct Entry {
    std::uint64_t header_offset = 0, size = 0;
    std::uint32_t crc32 = 0;
    bool is_encrypted = false, is_compressed = false;
  };

  /// Reads the directory; the files themselves are not touched. @param file  for messages
  /// @throws UserError "<file>: ..." when there is no directory or it contradicts itself
  ZipArchive(std::span<const std::byte> bytes, std::string file);

  const std::unordered_map<std::string, Entry>& entries() const { return entries_; }
  bool contains(const std::string& name) const { return entries_.contains(name); }
  /// @throws UserError when there is no such file, it is compressed, or it does not lie inside the archive
  std::span<const std::byte> content(const std::string& name) const;
  /// As `content`, its checksum compared.
  std::string_view checked_text(const std::string& name) const;

 private:
  void read_directory();

  std::span<const std::byte> bytes_;
  std::string file_;
  std::unordered_map<std::string, Entry> entries_;
};

}  // namespace mergex::io
