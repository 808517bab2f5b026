#include "tasks/text_to_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

namespace mergex::tasks {
namespace {

constexpr int kMostFifths = 25;  // STS-B's scores go from 0 to 5

}  // namespace

std::string text_to_text_input(const Example& example, std::string_view task, std::span<const std::string> keys) {
  std::vector<std::pair<std::string_view, std::string_view>> fields{{keys[0], example.text}};
  if (example.text_pair) fields.emplace_back(keys[1], *example.text_pair);
  std::ranges::sort(fields);
  std::string input(task);
  for (const auto& [key, text] : fields) input += fmt::format(" {}: {}", key, text);
  return input;
}

std::string target_text(double label, std::span<const std::string> labels) {
  if (!labels.empty()) return labels[static_cast<std::size_t>(label)];
  return fmt::format("{:.1f}", std::nearbyint(static_cast<float>(label) * 5.0f) / 5.0f);
}

std::optional<double> parse_target(std::string_view answer, std::span<const std::string> labels) {
  if (!labels.empty()) {
    const auto found = std::ranges::find(labels, answer);
    if (found == labels.end()) return std::nullopt;
    return static_cast<double>(found - labels.begin());
  }
  const auto begin = answer.find_first_not_of(' ');
  if (begin == std::string_view::npos) return std::nullopt;
  answer = answer.substr(begin, answer.find_last_not_of(' ') - begin + 1);
  double value = 0.0;
  const auto* end = answer.data() + answer.size();
  const auto [stopped, error] = std::from_chars(answer.data(), end, value);
  if (error != std::errc{} || stopped != end || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::vector<std::string> possible_targets(std::span<const std::string> labels) {
  std::vector<std::string> targets(labels.begin(), labels.end());
  for (int fifths = 0; labels.empty() && fifths <= kMostFifths; ++fifths) {
    targets.push_back(target_text(fifths / 5.0, labels));
  }
  return targets;
}

void make_text_to_text(Example& example, std::string_view task, std::span<const std::string> keys,
                       std::span<const std::string> labels) {
  example.text = text_to_text_input(example, task, keys);
  example.text_pair.reset();
  if (example.label) example.target = target_text(*example.label, labels);
}

}  // namespace mergex::tasks
