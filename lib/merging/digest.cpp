#include "merging/digest.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace mergex::merging {

BlockDigest digest_of_block(std::span<const std::byte> block) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(block.data(), block.size()));
  BlockDigest digest;
  static_assert(sizeof digest.bytes == sizeof canonical.digest);
  std::memcpy(digest.bytes, canonical.digest, sizeof digest.bytes);
  return digest;
}

std::size_t num_digest_blocks(std::uint64_t num_bytes) {
  return static_cast<std::size_t>((num_bytes + kDigestBlock - 1) / kDigestBlock);
}

std::string digest_of_tensor(std::span<const BlockDigest> blocks) {
  std::string hex;
  for (const auto byte : digest_of_block(std::as_bytes(blocks)).bytes) hex += fmt::format("{:02x}", byte);
  return hex;
}

std::string digest_of_tensor(std::span<const std::byte> bytes) {
  std::vector<BlockDigest> blocks;
  for (std::size_t begin = 0; begin < bytes.size(); begin += kDigestBlock) {
    blocks.push_back(digest_of_block(bytes.subspan(begin, std::min<std::size_t>(kDigestBlock, bytes.size() - begin))));
  }
  return digest_of_tensor(blocks);
}

}  // namespace mergex::merging
