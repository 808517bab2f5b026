#pragma once

#include <array>
#include <cstdint>

#include "merging/span_kernels.h"

namespace mergex::merging {

/// A word below this is drawn with the given probability in [0, 1), to a multiple of 2^-32.
inline std::uint32_t chance(double probability) {
  const double scaled = probability * 4294967296.0 + 0.5;
  return scaled <= 0.0 ? 0 : scaled >= 4294967295.0 ? 4294967295u : static_cast<std::uint32_t>(scaled);
}

/// The random word of each element of a tensor, from Philox with the element's position as the counter.
class RandomWords {
 public:
  explicit RandomWords(std::uint64_t key) : key_(key) {}

  /// Words of `count` <= kBlock elements from `begin` on; valid until the next call.
  const std::uint32_t* draw(std::int64_t begin, std::int64_t count) {
    const auto first = begin / kRandomBlock;
    const auto last = (begin + count + kRandomBlock - 1) / kRandomBlock;
    span_kernels<float>().random_words(static_cast<std::uint64_t>(first), last - first, key_, words_.data());
    return words_.data() + begin % kRandomBlock;
  }

 private:
  std::uint64_t key_;
  std::array<std::uint32_t, kBlock + 2 * kRandomBlock> words_;
};

}  // namespace mergex::merging
