#include "tasks/labels.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>

#include "core/error.h"
#include "core/one_line.h"
#include "core/suggest.h"

namespace mergex::tasks {
namespace {

template <class T>
std::optional<T> whole_text_as(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool is_whole_number(const std::string& text) { return whole_text_as<std::int64_t>(text).has_value(); }

std::string shown_cell(std::string_view cell) {
  // Cut between characters: the message must stay valid UTF-8.
  std::size_t length = std::min<std::size_t>(cell.size(), 60);
  while (length < cell.size() && length > 0 && (static_cast<unsigned char>(cell[length]) & 0xC0) == 0x80) --length;
  return fmt::format("\"{}{}\"", one_line(cell.substr(0, length)), length < cell.size() ? "..." : "");
}

std::string normalised(std::string_view name) {
  std::string result;
  for (const char c : name) {
    if (c == '_' || c == '-' || c == ' ') continue;
    result += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return result;
}

}  // namespace

Label class_label(std::string_view cell, std::span<const std::string> names, std::string_view no_label) {
  if (const auto found = std::ranges::find(names, cell); found != names.end()) {
    return {.value = static_cast<double>(found - names.begin())};
  }
  if (cell.empty() || cell == "-1" || (!no_label.empty() && cell == no_label)) return {};
  const bool numbers_are_names = std::ranges::any_of(names, is_whole_number);
  if (!numbers_are_names) {
    const auto number = whole_text_as<std::size_t>(cell);
    if (number && *number < names.size()) return {.value = static_cast<double>(*number)};
  }
  return {.problem = fmt::format("found label {}, expected {}{}{}", shown_cell(cell), quoted_list(names),
                                 numbers_are_names ? "" : fmt::format(" (or 0..{})", names.size() - 1),
                                 did_you_mean(cell, names))};
}

Label score_label(std::string_view cell, const io::Range& range, std::optional<double> no_label) {
  if (cell.empty()) return {};
  const auto value = whole_text_as<double>(cell);
  if (!value || !std::isfinite(*value)) {
    return {.problem = fmt::format("found score {}, expected a number", shown_cell(cell))};
  }
  if (no_label && *value == *no_label) return {};
  if ((range.at_least && *value < *range.at_least) || (range.at_most && *value > *range.at_most)) {
    return {.problem = fmt::format("found score {}, expected {:g}..{:g}", cell, range.at_least.value_or(-INFINITY),
                                   range.at_most.value_or(INFINITY))};
  }
  return {.value = value};
}

std::vector<std::string> distinct_labels(std::vector<std::string> cells) {
  std::ranges::sort(cells);
  const auto repeated = std::ranges::unique(cells);
  cells.erase(repeated.begin(), repeated.end());
  if (std::ranges::all_of(cells, is_whole_number)) {
    std::ranges::stable_sort(cells, {}, [](const std::string& cell) { return *whole_text_as<std::int64_t>(cell); });
  }
  return cells;
}

std::vector<std::size_t> match_labels(std::span<const std::string> task_labels,
                                      std::span<const std::string> checkpoint_labels, std::string_view origin) {
  const auto refuse = [&] {
    fail("{}: the head's labels are {}, the task's are {}; use a checkpoint of this task, or train a new head", origin,
         quoted_list(checkpoint_labels), quoted_list(task_labels));
  };
  if (task_labels.size() != checkpoint_labels.size()) refuse();
  bool unnamed = true;
  std::vector<std::string> outputs;
  for (std::size_t i = 0; i < checkpoint_labels.size(); ++i) {
    unnamed = unnamed && checkpoint_labels[i] == fmt::format("LABEL_{}", i);
    outputs.push_back(normalised(checkpoint_labels[i]));
  }
  std::vector<std::size_t> matched;
  for (std::size_t i = 0; i < task_labels.size(); ++i) {
    const auto wanted = normalised(task_labels[i]);
    const auto found = unnamed ? outputs.begin() + static_cast<std::ptrdiff_t>(i) : std::ranges::find(outputs, wanted);
    if (found == outputs.end() || (!unnamed && std::ranges::count(outputs, wanted) > 1)) refuse();
    matched.push_back(static_cast<std::size_t>(found - outputs.begin()));
  }
  return matched;
}

}  // namespace mergex::tasks
