#include "merging/digest.h"

#include <algorithm>
#include <cstring>
#include <string_view>

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
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string hex;
  for (const auto byte : digest_of_block(std::as_bytes(blocks)).bytes) {
    hex += kDigits[std::to_integer<std::size_t>(byte >> 4)];
    hex += kDigits[std::to_integer<std::size_t>(byte & std::byte{15})];
  }
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
