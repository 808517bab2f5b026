#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace mergex::training {

/// The order of the examples in an epoch: all of them, each once, by (seed, epoch) alone.
/// @param lengths  of each example: the examples of one optimiser step will be of similar length (shuffled, cut into
///                 parts of 50 steps, sorted within a part, steps shuffled; the short step of an epoch stays its last).
///                 Empty: plainly shuffled
/// @param per_step  examples of one optimiser step, so that batch size and accumulation do not change which ones it has
std::vector<std::size_t> epoch_order(std::size_t num_examples, std::uint64_t seed, std::int64_t epoch,
                                     std::span<const std::int64_t> lengths, std::size_t per_step);

}  // namespace mergex::training
