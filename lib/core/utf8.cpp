#include "core/utf8.h"

#include <cstdint>
#include <cstring>

namespace mergex {

std::optional<std::size_t> invalid_utf8_at(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto is_between = [](unsigned value, unsigned low, unsigned high) { return value >= low && value <= high; };
  std::size_t i = 0;
  while (i < text.size()) {
    std::uint64_t eight = 0;
    if (text.size() - i >= 8) {  // most text is ASCII
      std::memcpy(&eight, text.data() + i, 8);
      if ((eight & 0x8080808080808080u) == 0) {
        i += 8;
        continue;
      }
    }
    const unsigned lead = byte(i);
    if (lead < 0x80) {
      i += 1;
      continue;
    }
    const std::size_t length = is_between(lead, 0xC2, 0xDF)   ? 2
                               : is_between(lead, 0xE0, 0xEF) ? 3
                               : is_between(lead, 0xF0, 0xF4) ? 4
                                                              : 0;
    if (length == 0) return i;
    // The second byte is where overlong forms, surrogates and too large values show.
    const unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (!is_between(byte(i + 1), low, high)) return i;
    for (std::size_t k = 2; k < length; ++k) {
      if (!is_between(byte(i + k), 0x80, 0xBF)) return i;
    }
    i += length;
  }
  return std::nullopt;
}

}  // namespace mergex
