#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace mergex {

/// Seed of the named random stream of a run: streams of one run, and the same stream of two runs, do not overlap
/// in practice. The same on every machine.
std::uint64_t stream_seed(std::uint64_t seed, std::string_view name);

/// SplitMix64 (Steele, Lea and Flood 2014): small, seedable by any number, the same on every machine.
class SplitMix64 {
 public:
  explicit SplitMix64(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next();
  /// Uniform in [0, bound), without modulo bias; bound > 0.
  std::uint64_t below(std::uint64_t bound);
  /// Uniform in [0, 1).
  double uniform();

 private:
  std::uint64_t state_;
};

/// A uniformly drawn order of 0 .. count-1 (Fisher and Yates).
std::vector<std::size_t> random_permutation(std::size_t count, std::uint64_t seed);

}  // namespace mergex
