#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <utility>

namespace mergex::io {

/// An open file, closed with this object. All members throw std::system_error with the name of the file.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  /// @param flags  of open(2); O_CLOEXEC is added
  FileDescriptor(std::filesystem::path path, int flags);
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(fd_, other.fd_);
    return *this;
  }

  int fd() const { return fd_; }
  const std::filesystem::path& path() const { return path_; }

  void write_at(std::uint64_t offset, std::span<const std::byte> bytes) const;
  /// A file that ends too early is an error, too.
  void read_at(std::uint64_t offset, std::span<std::byte> bytes) const;
  /// fdatasync
  void sync() const;
  /// Throws for the current errno: "<file>: cannot be <what>: <reason>".
  [[noreturn]] void fail_with_errno(const char* what) const;

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace mergex::io
