#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/random.h"

namespace mergex::fuzz {

/// Makes damaged inputs out of valid ones; the same from the same seed.
class Mutator {
 public:
  /// @param tokens  words of the format, to be put where they do not belong
  Mutator(std::uint64_t seed, std::vector<std::string> tokens) : random_(seed), tokens_(std::move(tokens)) {}

  /// One to a few changes. @param others  inputs from which parts may be taken
  std::string operator()(std::string bytes, std::span<const std::string> others);

  std::uint64_t below(std::uint64_t bound) { return random_.below(bound); }
  bool one_in(std::uint64_t chances) { return random_.below(chances) == 0; }

 private:
  void mutate(std::string& bytes, std::span<const std::string> others);
  void edit_number(std::string& bytes, std::size_t from);
  void edit_integer(std::string& bytes, std::size_t at);

  SplitMix64 random_;
  std::vector<std::string> tokens_;
};

}  // namespace mergex::fuzz
