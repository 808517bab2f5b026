#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace mergex::text {

/// Offset of the first byte that does not belong to well-formed UTF-8 (Unicode 15, table 3-7: no overlong forms, no
/// surrogates, nothing above U+10FFFF); nullopt when all is well.
std::optional<std::size_t> invalid_utf8_at(std::string_view text);

}  // namespace mergex::text
