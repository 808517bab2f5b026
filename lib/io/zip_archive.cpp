#include "io/zip_archive.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "core/error.h"
#include "io/json.h"

namespace mergex::io {
namespace {

constexpr std::uint32_t kLocalHeader = 0x04034b50, kDirectoryEntry = 0x02014b50, kDirectoryEnd = 0x06054b50,
                        kDirectoryEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
constexpr std::size_t kLocalHeaderBytes = 30, kDirectoryEntryBytes = 46, kDirectoryEndBytes = 22,
                      kDirectoryEnd64Bytes = 56, kLocator64Bytes = 20, kMaxCommentBytes = 0xFFFF;
constexpr std::uint16_t kExtra64 = 1;

/// A number, little endian, at an offset that the caller has checked.
template <class T>
T number(std::span<const std::byte> bytes, std::uint64_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

/// `count` bytes from `at` on; nothing where they are not all there.
std::optional<std::span<const std::byte>> part(std::span<const std::byte> bytes, std::uint64_t at,
                                               std::uint64_t count) {
  if (at > bytes.size() || count > bytes.size() - at) return std::nullopt;
  return bytes.subspan(at, count);
}

std::string text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

ZipArchive::ZipArchive(std::span<const std::byte> bytes, std::string file) : bytes_(bytes), file_(std::move(file)) {
  read_directory();
}

void ZipArchive::read_directory() {
  // The end record is last, but for a comment of unknown length.
  std::optional<std::uint64_t> end;
  for (std::uint64_t back = kDirectoryEndBytes; back <= std::min(bytes_.size(), kDirectoryEndBytes + kMaxCommentBytes);
       ++back) {
    const auto at = bytes_.size() - back;
    if (number<std::uint32_t>(bytes_, at) == kDirectoryEnd &&
        number<std::uint16_t>(bytes_, at + 20) == back - kDirectoryEndBytes) {
      end = at;
      break;
    }
  }
  if (!end) fail("{}: truncated: the directory at the end of the archive is missing; download or copy it again", file_);

  std::uint64_t num_entries = number<std::uint16_t>(bytes_, *end + 10);
  std::uint64_t size = number<std::uint32_t>(bytes_, *end + 12), offset = number<std::uint32_t>(bytes_, *end + 16);
  const auto damaged = [&](std::string_view what) {
    fail("{}: damaged archive: {}; download or copy it again", file_, what);
  };
  if (*end >= kLocator64Bytes && number<std::uint32_t>(bytes_, *end - kLocator64Bytes) == kLocator64) {
    const auto record = part(bytes_, number<std::uint64_t>(bytes_, *end - kLocator64Bytes + 8), kDirectoryEnd64Bytes);
    if (!record || number<std::uint32_t>(*record, 0) != kDirectoryEnd64) {
      damaged("its zip64 record is not where it should be");
    }
    num_entries = number<std::uint64_t>(*record, 32);
    size = number<std::uint64_t>(*record, 40);
    offset = number<std::uint64_t>(*record, 48);
  }
  const auto directory = part(bytes_, offset, size);
  if (!directory) damaged("its directory does not lie inside the file");

  std::uint64_t at = 0;
  for (std::uint64_t i = 0; i < num_entries; ++i) {
    const auto fixed = part(*directory, at, kDirectoryEntryBytes);
    if (!fixed || number<std::uint32_t>(*fixed, 0) != kDirectoryEntry) damaged("an entry of its directory is cut");
    const auto name_size = number<std::uint16_t>(*fixed, 28), extra_size = number<std::uint16_t>(*fixed, 30);
    const auto name = part(*directory, at + kDirectoryEntryBytes, name_size);
    const auto extra = part(*directory, at + kDirectoryEntryBytes + name_size, extra_size);
    if (!name || !extra) damaged("an entry of its directory is cut");
    Entry entry{.header_offset = number<std::uint32_t>(*fixed, 42),
                .size = number<std::uint32_t>(*fixed, 24),
                .crc32 = number<std::uint32_t>(*fixed, 16),
                .is_encrypted = (number<std::uint16_t>(*fixed, 8) & 1) != 0,
                .is_compressed = number<std::uint16_t>(*fixed, 10) != 0};
    // A zip64 field holds, in this order, those of three numbers that do not fit their 32 bits.
    const bool is_large = entry.size == UINT32_MAX, is_far = entry.header_offset == UINT32_MAX;
    const bool is_stored_large = number<std::uint32_t>(*fixed, 20) == UINT32_MAX;
    for (std::uint64_t field = 0; field + 4 <= extra_size;) {
      const auto field_size = number<std::uint16_t>(*extra, field + 2);
      const auto content = part(*extra, field + 4, field_size);
      if (!content) damaged("an entry of its directory is cut");
      if (number<std::uint16_t>(*extra, field) == kExtra64) {
        const std::size_t needed = 8 * (std::size_t{is_large} + std::size_t{is_stored_large} + std::size_t{is_far});
        if (content->size() < needed) damaged("an entry of its directory is cut");
        if (is_large) entry.size = number<std::uint64_t>(*content, 0);
        if (is_far) entry.header_offset = number<std::uint64_t>(*content, needed - 8);
      }
      field += 4u + field_size;
    }
    if (!entries_.emplace(text(*name), entry).second) {
      damaged(fmt::format("it holds {} twice", shown(Json(text(*name)))));
    }
    at += kDirectoryEntryBytes + name_size + extra_size + number<std::uint16_t>(*fixed, 32);
  }
}

std::span<const std::byte> ZipArchive::content(const std::string& name) const {
  const auto found = entries_.find(name);
  const auto shown_name = shown(Json(name));
  if (found == entries_.end()) {
    fail("{}: damaged archive: it holds no {}; download or copy it again", file_, shown_name);
  }
  const auto& entry = found->second;
  if (entry.is_encrypted) fail("{}: {} is encrypted; save the file again without a password", file_, shown_name);
  if (entry.is_compressed) {
    fail("{}: {} is compressed; save it again with torch.save, which does not compress", file_, shown_name);
  }
  const auto header = part(bytes_, entry.header_offset, kLocalHeaderBytes);
  if (!header || number<std::uint32_t>(*header, 0) != kLocalHeader) {
    fail("{}: damaged archive: {} is not where the directory says; download or copy it again", file_, shown_name);
  }
  // The local header has its own extra field, by which programs align the content.
  const auto begin =
      entry.header_offset + kLocalHeaderBytes + number<std::uint16_t>(*header, 26) + number<std::uint16_t>(*header, 28);
  const auto content = part(bytes_, begin, entry.size);
  if (!content) fail("{}: damaged archive: {} reaches beyond the file; download or copy it again", file_, shown_name);
  return *content;
}

std::string_view ZipArchive::checked_text(const std::string& name) const {
  const auto bytes = content(name);
  const auto* data = reinterpret_cast<const char*>(bytes.data());
  if (::crc32_z(0, reinterpret_cast<const Bytef*>(data), bytes.size()) != entries_.at(name).crc32) {
    fail("{}: damaged archive: the checksum of {} is wrong; download or copy it again", file_, shown(Json(name)));
  }
  return {data, bytes.size()};
}

}  // namespace mergex::io
