#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mergex {

/// Number of single-character insertions, deletions, substitutions and swaps of neighbours between two words.
std::size_t edit_distance(std::string_view a, std::string_view b);

/// The candidate closest to `word` (upper case does not count), or "" when none is close enough to be a likely slip of the hand.
std::string nearest(std::string_view word, std::span<const std::string> candidates);

/// `; did you mean "ties"?`, or "" when nothing is near: to be put behind an error about an unknown name.
std::string did_you_mean(std::string_view word, std::span<const std::string> candidates);

/// `"a", "b" or "c"`.
std::string quoted_list(std::span<const std::string> names);

}  // namespace mergex
