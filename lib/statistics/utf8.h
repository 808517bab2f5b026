#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace mergex::statistics {

/// One character of UTF-8 text: its code point, U+FFFD where the bytes are not UTF-8, and its bytes.
struct CodePoint {
  char32_t value = 0;
  std::string_view bytes;
};

/// The character at the start of `text`, which must not be empty.
CodePoint first_code_point(std::string_view text);

/// Number of characters, which is the width in a terminal for the scripts that method names are written in.
std::size_t display_width(std::string_view text);

/// For the text and attribute values of XML 1.0: markup is escaped; what XML cannot carry becomes U+FFFD.
std::string escape_xml(std::string_view text);

}  // namespace mergex::statistics
