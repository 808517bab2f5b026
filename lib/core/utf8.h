#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace mergex {

/// Offset of the first byte that does not belong to well-formed UTF-8 (Unicode 15, table 3-7: no overlong forms, no
/// surrogates, nothing above U+10FFFF); nullopt when all is well.
std::optional<std::size_t> invalid_utf8_at(std::string_view text);

inline bool is_valid_utf8(std::string_view text) { return !invalid_utf8_at(text); }

}  // namespace mergex
