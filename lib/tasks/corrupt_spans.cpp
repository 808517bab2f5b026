#include "tasks/corrupt_spans.h"

#include <algorithm>
#include <cmath>

#include "core/random.h"

namespace mergex::tasks {
namespace {

struct Counts {
  std::int64_t noise, spans;
};

Counts counts(std::int64_t length, const SpanCorruption& o) {
  auto noise = static_cast<std::int64_t>(std::nearbyint(static_cast<double>(length) * o.noise_density));
  noise = std::clamp<std::int64_t>(noise, 1, std::max<std::int64_t>(length - 1, 1));
  auto spans = static_cast<std::int64_t>(std::nearbyint(static_cast<double>(noise) / o.mean_span_length));
  // Each span needs a token of noise and one before it that is none.
  spans = std::clamp<std::int64_t>(spans, 1, std::max<std::int64_t>(std::min(noise, length - noise), 1));
  return {noise, spans};
}

/// `total` items in `parts` non-empty segments, every cut equally likely.
std::vector<std::int64_t> random_segments(std::int64_t total, std::int64_t parts, SplitMix64& random) {
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(parts), 1);
  // A uniform choice of parts-1 of the total-1 gaps: selection sampling (Knuth, algorithm S).
  std::int64_t needed = parts - 1, at = 0;
  std::size_t segment = 0;
  for (std::int64_t gap = 0; gap < total - 1; ++gap) {
    const auto left = static_cast<std::uint64_t>(total - 1 - gap);
    if (needed > 0 && random.below(left) < static_cast<std::uint64_t>(needed)) {
      lengths[segment++] = gap + 1 - at;
      at = gap + 1;
      --needed;
    }
  }
  lengths[segment] = total - at;
  return lengths;
}

}  // namespace

SpanLengths span_lengths(std::int64_t inputs_length, const SpanCorruption& o) {
  const auto inputs_of = [&](std::int64_t tokens) {
    const auto [noise, spans] = counts(tokens, o);
    return tokens - noise + spans + 1;
  };
  std::int64_t tokens = 2;
  while (inputs_of(tokens + 1) <= inputs_length) ++tokens;
  const auto [noise, spans] = counts(tokens, o);
  return {tokens, noise + spans + 1, spans};
}

std::vector<bool> random_spans_noise_mask(std::int64_t length, const SpanCorruption& o, std::uint64_t seed) {
  std::vector<bool> mask;
  mask.reserve(static_cast<std::size_t>(length));
  if (length < 2) return std::vector<bool>(static_cast<std::size_t>(length), false);
  const auto [noise, spans] = counts(length, o);
  SplitMix64 random(seed);
  const auto noise_lengths = random_segments(noise, spans, random);
  const auto other_lengths = random_segments(length - noise, spans, random);
  for (std::size_t i = 0; i < noise_lengths.size(); ++i) {
    mask.insert(mask.end(), static_cast<std::size_t>(other_lengths[i]), false);
    mask.insert(mask.end(), static_cast<std::size_t>(noise_lengths[i]), true);
  }
  return mask;
}

std::vector<std::int32_t> replace_spans(std::span<const std::int32_t> tokens, const std::vector<bool>& mask,
                                        bool replaced, const std::function<std::int32_t(int)>& sentinel) {
  std::vector<std::int32_t> result;
  int spans = 0;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (mask[i] != replaced) {
      result.push_back(tokens[i]);
    } else if (i == 0 || mask[i - 1] != replaced) {
      result.push_back(sentinel(spans++));
    }
  }
  return result;
}

}  // namespace mergex::tasks
