#include "core/bytes.h"

#include <array>
#include <charconv>
#include <cmath>

#include "core/error.h"
#include "core/one_line.h"

namespace mergex {

std::uint64_t parse_bytes(std::string_view text, std::string_view where) {
  const auto bad = [&] { fail("{}: got \"{}\", expected a size such as 512MiB or 5GB", where, one_line(text)); };
  double number = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !std::isfinite(number) || number < 0.0) bad();
  std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  if (unit.ends_with('B') || unit.ends_with('b')) unit.remove_suffix(1);
  double factor = 1.0;
  if (!unit.empty()) {
    constexpr std::string_view kPrefixes = "KMGT", kSmall = "kmgt";
    auto power = kPrefixes.find(unit[0]);
    if (power == std::string_view::npos) power = kSmall.find(unit[0]);
    const bool is_binary = unit.size() == 2 && unit[1] == 'i';
    if (power == std::string_view::npos || (unit.size() > 1 && !is_binary)) bad();
    factor = std::pow(is_binary ? 1024.0 : 1000.0, static_cast<double>(power + 1));
  }
  const double bytes = number * factor;
  if (bytes < 1.0 || bytes > 9e18) bad();
  return static_cast<std::uint64_t>(bytes);
}

std::string bytes_text(std::uint64_t bytes) {
  if (bytes < 1000) return fmt::format("{} B", bytes);
  constexpr std::array kUnits{"kB", "MB", "GB", "TB", "PB", "EB"};
  double value = static_cast<double>(bytes) / 1000.0;
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < kUnits.size()) {
    value /= 1000.0;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0, kUnits[unit]);
}

}  // namespace mergex
