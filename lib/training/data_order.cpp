#include "training/data_order.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/random.h"

namespace mergex::training {

std::vector<std::size_t> epoch_order(std::size_t num_examples, std::uint64_t seed, std::int64_t epoch,
                                     std::span<const std::int64_t> lengths, std::size_t per_step) {
  constexpr std::size_t kStepsSorted = 50;
  auto order = random_permutation(num_examples, stream_seed(seed, fmt::format("data_order/{}", epoch)));
  if (lengths.empty()) return order;
  for (std::size_t begin = 0; begin < num_examples; begin += kStepsSorted * per_step) {
    const auto part = std::span(order).subspan(begin, std::min(kStepsSorted * per_step, num_examples - begin));
    std::ranges::stable_sort(part, std::ranges::greater(), [&](std::size_t i) { return lengths[i]; });
  }
  const auto full_steps = num_examples / per_step;
  std::vector<std::size_t> shuffled;
  for (const auto step : random_permutation(full_steps, stream_seed(seed, fmt::format("step_order/{}", epoch)))) {
    const auto members = std::span(order).subspan(step * per_step, per_step);
    shuffled.insert(shuffled.end(), members.begin(), members.end());
  }
  shuffled.insert(shuffled.end(), order.begin() + static_cast<std::ptrdiff_t>(full_steps * per_step), order.end());
  return shuffled;
}

}  // namespace mergex::training
