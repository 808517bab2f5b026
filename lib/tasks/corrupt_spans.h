#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tasks/task.h"

namespace mergex::tasks {

// T5's span corruption. Source: Raffel et al. 2020, section 3.1.4 and 3.3 (arXiv:1910.10683).

/// The longest text that, corrupted, fills at most `inputs_length` input ids (sentinels and the end token counted),
/// and how many target ids and spans it gives.
struct SpanLengths {
  std::int64_t text = 0, targets = 0, spans = 0;
};
SpanLengths span_lengths(std::int64_t inputs_length, const SpanCorruption& options);

/// Which tokens are noise: round(length * density) of them, at least one and not all, in spans of the given mean
/// length, cut at random; the text never begins with noise.
std::vector<bool> random_spans_noise_mask(std::int64_t length, const SpanCorruption& options, std::uint64_t seed);

/// Each run of tokens whose mask equals `replaced` becomes one sentinel, the first run sentinel(0) and so on.
std::vector<std::int32_t> replace_spans(std::span<const std::int32_t> tokens, const std::vector<bool>& mask,
                                        bool replaced, const std::function<std::int32_t(int)>& sentinel);

}  // namespace mergex::tasks
