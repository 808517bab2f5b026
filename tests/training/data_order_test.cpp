#include "training/data_order.h"

#include <algorithm>
#include <set>

#include "core/random.h"
#include "support/catch.h"

using namespace mergex;

namespace {

std::vector<std::int64_t> random_lengths(std::size_t count) {
  SplitMix64 random(7);
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 0; i < count; ++i) lengths.push_back(1 + static_cast<std::int64_t>(random.below(100)));
  return lengths;
}

/// Positions that padding fills when each step is one batch, as a share of all.
double padded_share(const std::vector<std::size_t>& order, const std::vector<std::int64_t>& lengths, std::size_t per_step) {
  double real = 0.0, all = 0.0;
  for (std::size_t at = 0; at < order.size(); at += per_step) {
    std::int64_t longest = 0;
    const auto end = std::min(order.size(), at + per_step);
    for (auto i = at; i < end; ++i) {
      longest = std::max(longest, lengths[order[i]]);
      real += static_cast<double>(lengths[order[i]]);
    }
    all += static_cast<double>(longest) * static_cast<double>(end - at);
  }
  return 1.0 - real / all;
}

}  // namespace

TEST_CASE("an epoch has every example once, by seed and epoch alone (E2)", "[training][law]") {
  const auto count = GENERATE(std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{1003});
  const auto is_bucketed = GENERATE(false, true);
  const auto lengths = is_bucketed ? random_lengths(count) : std::vector<std::int64_t>{};
  const auto order = training::epoch_order(count, 1, 0, lengths, 8);
  CHECK(std::set(order.begin(), order.end()).size() == count);
  CHECK(order.size() == count);
  CHECK(*std::ranges::max_element(order) == count - 1);
  CHECK(order == training::epoch_order(count, 1, 0, lengths, 8));
  if (count > 100) {
    CHECK(order != training::epoch_order(count, 1, 1, lengths, 8));
    CHECK(order != training::epoch_order(count, 2, 0, lengths, 8));
  }
}

TEST_CASE("bucketing leaves little padding, in no order of length", "[training][law]") {
  const auto lengths = random_lengths(4000);
  const auto plain = training::epoch_order(4000, 1, 0, {}, 8), bucketed = training::epoch_order(4000, 1, 0, lengths, 8);
  CHECK(padded_share(plain, lengths, 8) > 0.4);
  CHECK(padded_share(bucketed, lengths, 8) < 0.03);
  int rises = 0;
  for (std::size_t step = 1; step < 500; ++step) rises += lengths[bucketed[8 * step]] > lengths[bucketed[8 * (step - 1)]];
  CHECK(rises > 200);
  CHECK(rises < 300);
}
