#include "io/file_descriptor.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace mergex::io {

FileDescriptor::FileDescriptor(std::filesystem::path path, int flags)
    : path_(std::move(path)), fd_(::open(path_.c_str(), flags | O_CLOEXEC, 0666)) {
  if (fd_ < 0) fail_with_errno("opened");
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

void FileDescriptor::write_at(std::uint64_t offset, std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const auto written = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0) {
      if (errno == EINTR) continue;
      fail_with_errno("written");
    }
    offset += static_cast<std::uint64_t>(written);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void FileDescriptor::read_at(std::uint64_t offset, std::span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const auto got = ::pread(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (got <= 0) {
      if (got < 0 && errno == EINTR) continue;
      if (got == 0) errno = ENODATA;
      fail_with_errno("read");
    }
    offset += static_cast<std::uint64_t>(got);
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
}

void FileDescriptor::sync() const {
  if (::fdatasync(fd_) != 0) fail_with_errno("synced");
}

void FileDescriptor::fail_with_errno(const char* what) const {
  throw std::system_error(errno, std::generic_category(), fmt::format("{}: cannot be {}", path_.string(), what));
}

}  // namespace mergex::io
