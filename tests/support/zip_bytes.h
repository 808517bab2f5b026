#pragma once

#include <zlib.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace mergex::test {

struct ZipFile {
  std::string name, content;
  std::uint16_t method = 0;  ///< as the headers say: 0 is stored
  std::uint16_t flags = 0;
};

struct ZipOptions {
  bool is_zip64 = false;  ///< sizes and offsets in zip64 records only
  std::string comment = {};
};

/// A zip archive of files that are stored as they are.
inline std::string zip_bytes(const std::vector<ZipFile>& files, const ZipOptions& options = {}) {
  const auto put = [](std::string& out, std::uint64_t value, std::size_t width) {
    out.append(reinterpret_cast<const char*>(&value), width);  // little endian, as everywhere here
  };
  std::string bytes, directory;
  for (const auto& file : files) {
    const auto crc = crc32_z(0, reinterpret_cast<const Bytef*>(file.content.data()), file.content.size());
    const auto offset = bytes.size();
    const std::uint64_t unknown = 0xFFFFFFFF;
    bytes += "PK\x03\x04";
    put(bytes, 20, 2);
    put(bytes, file.flags, 2);
    put(bytes, file.method, 2);
    put(bytes, 0, 4);
    put(bytes, crc, 4);
    put(bytes, file.content.size(), 4);
    put(bytes, file.content.size(), 4);
    put(bytes, file.name.size(), 2);
    put(bytes, 5, 2);  // an extra field, to be stepped over
    bytes += file.name + std::string("FB\1\0Z", 5) + file.content;

    directory += "PK\x01\x02";
    put(directory, 20, 2);
    put(directory, 20, 2);
    put(directory, file.flags, 2);
    put(directory, file.method, 2);
    put(directory, 0, 4);
    put(directory, crc, 4);
    put(directory, options.is_zip64 ? unknown : file.content.size(), 4);
    put(directory, options.is_zip64 ? unknown : file.content.size(), 4);
    put(directory, file.name.size(), 2);
    put(directory, options.is_zip64 ? 4 + 24 : 0, 2);
    put(directory, 0, 2);
    put(directory, 0, 2);
    put(directory, 0, 2);
    put(directory, 0, 4);
    put(directory, options.is_zip64 ? unknown : offset, 4);
    directory += file.name;
    if (!options.is_zip64) continue;
    put(directory, 1, 2);
    put(directory, 24, 2);
    put(directory, file.content.size(), 8);
    put(directory, file.content.size(), 8);
    put(directory, offset, 8);
  }
  const auto begin = bytes.size();
  bytes += directory;
  if (options.is_zip64) {
    const auto record = bytes.size();
    bytes += "PK\x06\x06";
    put(bytes, 44, 8);
    put(bytes, 45, 2);
    put(bytes, 45, 2);
    put(bytes, 0, 8);
    put(bytes, files.size(), 8);
    put(bytes, files.size(), 8);
    put(bytes, directory.size(), 8);
    put(bytes, begin, 8);
    bytes += "PK\x06\x07";
    put(bytes, 0, 4);
    put(bytes, record, 8);
    put(bytes, 1, 4);
  }
  bytes += "PK\x05\x06";
  put(bytes, 0, 4);
  for (int i = 0; i < 2; ++i) put(bytes, options.is_zip64 ? 0xFFFF : files.size(), 2);
  put(bytes, options.is_zip64 ? 0xFFFFFFFF : directory.size(), 4);
  put(bytes, options.is_zip64 ? 0xFFFFFFFF : begin, 4);
  put(bytes, options.comment.size(), 2);
  return bytes + options.comment;
}

}  // namespace mergex::test
