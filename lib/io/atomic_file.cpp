#include "io/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <system_error>

#include "core/error.h"
#include "core/one_line.h"

namespace mergex::io {
namespace {

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

std::string read_file(const std::filesystem::path& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) fail("{}: is a folder, expected a file", one_line(path.string()));
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    fail("{}: {}", one_line(path.string()),
         std::filesystem::exists(path, ignored) ? "cannot be read (permissions?)" : "no such file");
  }
  std::ostringstream content;
  content << in.rdbuf();
  if (in.bad()) fail("{}: reading failed", path.string());
  return std::move(content).str();
}

void write_all(int fd, const char* data, std::size_t size) {
  while (size > 0) {
    const auto written = ::write(fd, data, size);
    if (written < 0) {
      if (errno == EINTR) continue;
      throw_errno("write");
    }
    data += written;
    size -= static_cast<std::size_t>(written);
  }
}

void write_file_with(const std::filesystem::path& path, const std::function<void(int fd)>& write) {
  const auto temporary = path.string() + ".partial";
  try {
    Descriptor file{::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)};
    if (file.fd < 0) throw_errno("open");
    write(file.fd);
    if (::fsync(file.fd) != 0) throw_errno("fsync");
    if (::rename(temporary.c_str(), path.c_str()) != 0) throw_errno("rename");
  } catch (const std::system_error& error) {
    ::unlink(temporary.c_str());
    throw std::system_error(error.code(), fmt::format("{}: cannot be written", path.string()));
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  sync_folder(path.parent_path());
}

void write_file(const std::filesystem::path& path, std::string_view content) {
  write_file_with(path, [&](int fd) { write_all(fd, content.data(), content.size()); });
}

void sync_folder(const std::filesystem::path& folder) {
  const auto name = folder.empty() ? std::string(".") : folder.string();
  Descriptor descriptor{::open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  if (descriptor.fd >= 0) ::fsync(descriptor.fd);  // some file systems cannot; the files themselves are synced
}

}  // namespace mergex::io
