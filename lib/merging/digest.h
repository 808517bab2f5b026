#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace mergex::merging {

/// XXH3-128 of the digests of a tensor's blocks of 1 MiB, in their order: threads can share a large tensor, and a check
/// runs at the speed of memory. It finds damage; it is no protection from forgery.
inline constexpr std::uint64_t kDigestBlock = 1 << 20;

/// XXH3-128 (xxHash 0.8, seed 0), big endian.
struct BlockDigest {
  std::byte bytes[16] = {};
};

BlockDigest digest_of_block(std::span<const std::byte> block);
std::size_t num_digest_blocks(std::uint64_t num_bytes);
/// 32 lower-case hexadecimal digits. @param blocks  `num_digest_blocks` of them
std::string digest_of_tensor(std::span<const BlockDigest> blocks);
/// From one thread. @return the same
std::string digest_of_tensor(std::span<const std::byte> bytes);

}  // namespace mergex::merging
