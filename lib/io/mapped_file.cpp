#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace mergex::io {
namespace {

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path, const char* kind) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};  // a pipe must not block here
  if (file.fd < 0) {
    fail("{}: {}", path.string(),
         errno == ENOENT ? "no such file" : fmt::format("cannot be read: {}", std::strerror(errno)));
  }
  struct stat info {};
  if (::fstat(file.fd, &info) != 0) fail("{}: cannot be read: {}", path.string(), std::strerror(errno));
  if (!S_ISREG(info.st_mode)) fail("{}: is no regular file, expected {}", path.string(), kind);
  const auto size = static_cast<std::size_t>(info.st_size);
  if (size == 0) return;  // cannot be mapped, need not be
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (address == MAP_FAILED) fail("{}: cannot be mapped into memory: {}", path.string(), std::strerror(errno));
  bytes_ = {static_cast<const std::byte*>(address), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace mergex::io
