#pragma once

#include <fmt/format.h>

#include <string_view>

namespace mergex::log {

enum class Level { kDebug, kInfo, kWarn, kQuiet };

/// Lines below `level` are dropped. Everything goes to stderr; results alone go to stdout.
void set_level(Level level);
Level level();

void write(Level level, std::string_view message);

template <class... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  if (level() <= Level::kDebug) write(Level::kDebug, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  if (level() <= Level::kInfo) write(Level::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
/// The run goes on with another result than the recipe might suggest; once per cause.
template <class... Args>
void warn(fmt::format_string<Args...> format, Args&&... args) {
  if (level() <= Level::kWarn) write(Level::kWarn, fmt::format(format, std::forward<Args>(args)...));
}

/// Shows `text` on one line of the terminal that the next status or log line replaces. Where stderr is no
/// terminal nothing is shown, and `false` is returned.
bool status(std::string_view text);

}  // namespace mergex::log
