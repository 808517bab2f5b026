#include "io/sha256.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "core/error.h"

namespace mergex::io {
namespace {

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new(), &EVP_MD_CTX_free) {
    check(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
  }
  void add(std::span<const std::byte> bytes) { check(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1); }
  std::string hex() {
    std::array<unsigned char, 32> digest{};
    check(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr) == 1);
    return fmt::format("{:02x}", fmt::join(digest, ""));
  }

 private:
  static void check(bool ok) {
    if (!ok) throw std::runtime_error("SHA-256 failed");
  }
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

std::string sha256_hex(std::span<const std::byte> bytes) {
  Sha256 hash;
  hash.add(bytes);
  return hash.hex();
}

std::string sha256_file(const std::filesystem::path& path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) {
    fail("{}: {}", path.string(), errno == ENOENT ? "no such file" : fmt::format("cannot be read: {}", std::strerror(errno)));
  }
  Sha256 hash;
  std::vector<std::byte> buffer(std::size_t{1} << 20);
  while (true) {
    const auto got = ::read(file.fd, buffer.data(), buffer.size());
    if (got == 0) return hash.hex();
    if (got > 0) {
      hash.add(std::span(buffer).first(static_cast<std::size_t>(got)));
    } else if (errno != EINTR) {
      fail("{}: cannot be read: {}", path.string(), std::strerror(errno));
    }
  }
}

}  // namespace mergex::io
