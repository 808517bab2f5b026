#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace mergex::io {

/// CRC-32C (Castagnoli; RFC 3720, appendix B.4).
std::uint32_t crc32c(std::string_view bytes);

/// Scalars in the file format that TensorBoard reads: records of length, masked CRC-32C, a protobuf `Event`, masked
/// CRC-32C. A record is written by one call, so that a kill leaves at most the last one cut, which readers ignore.
/// Every writer starts a file of its own and declares that it replaces what earlier files in the folder hold from its
/// first step on.
class TensorboardEvents {
 public:
  /// Makes `events.out.tfevents.<time>` in the folder. @param first_step  points of earlier files from here on go
  /// @throws std::system_error
  TensorboardEvents(const std::filesystem::path& folder, std::int64_t first_step);
  ~TensorboardEvents();
  TensorboardEvents(const TensorboardEvents&) = delete;
  TensorboardEvents& operator=(const TensorboardEvents&) = delete;

  /// Values of one step, by tag ("train/loss").
  void add(std::int64_t step, std::span<const std::pair<std::string, double>> scalars);

  const std::filesystem::path& path() const { return path_; }

 private:
  void write(std::string_view event);

  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace mergex::io
