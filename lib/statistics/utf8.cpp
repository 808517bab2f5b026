#include "statistics/utf8.h"

namespace mergex::statistics {

CodePoint first_code_point(std::string_view text) {
  const CodePoint invalid{0xFFFD, text.substr(0, 1)};
  const auto lead = static_cast<unsigned char>(text.front());
  if (lead < 0x80) return {lead, text.substr(0, 1)};
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < length) return invalid;
  char32_t value = lead & (0xFFu >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if ((byte & 0xC0) != 0x80) return invalid;
    value = (value << 6) | (byte & 0x3Fu);
  }
  const bool overlong = (length == 3 && value < 0x800) || (length == 4 && value < 0x10000);
  const bool surrogate = value >= 0xD800 && value <= 0xDFFF;
  if (overlong || surrogate || value > 0x10FFFF) return invalid;
  return {value, text.substr(0, length)};
}

std::size_t display_width(std::string_view text) {
  std::size_t width = 0;
  for (; !text.empty(); ++width) text.remove_prefix(first_code_point(text).bytes.size());
  return width;
}

std::string escape_xml(std::string_view text) {
  std::string escaped;
  while (!text.empty()) {
    const auto [value, bytes] = first_code_point(text);
    text.remove_prefix(bytes.size());
    const bool control = value < 0x20 && value != '\t' && value != '\n' && value != '\r';
    switch (value) {
      case '&': escaped += "&amp;"; break;
      case '<': escaped += "&lt;"; break;
      case '>': escaped += "&gt;"; break;
      case '"': escaped += "&quot;"; break;
      default:
        if (control || value == 0xFFFD || value == 0xFFFE || value == 0xFFFF) {
          escaped += "\uFFFD";
        } else {
          escaped += bytes;
        }
    }
  }
  return escaped;
}

}  // namespace mergex::statistics
