#include "merging/selection.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/random.h"
#include "support/catch.h"

namespace mergex::merging {
namespace {

enum class Kind { kNormal, kFewValues, kAllEqual, kZeros, kBrainFloats };

template <class T>
std::vector<T> values_of(Kind kind, std::int64_t count, std::uint64_t seed) {
  SplitMix64 generator(seed);
  std::vector<T> values;
  for (std::int64_t i = 0; i < count; ++i) {
    const double x = generator.uniform() + generator.uniform() - 1.0;
    switch (kind) {
      case Kind::kNormal: values.push_back(static_cast<T>(x)); break;
      case Kind::kFewValues: values.push_back(static_cast<T>(std::round(3.0 * x) / 7.0)); break;
      case Kind::kAllEqual: values.push_back(static_cast<T>(x < 0 ? -0.1 : 0.1)); break;
      case Kind::kZeros: values.push_back(static_cast<T>(x < 0.9 ? 0.0 : x)); break;
      case Kind::kBrainFloats: values.push_back(static_cast<T>(std::round(x * 256.0) / 256.0)); break;
    }
  }
  return values;
}

/// Positions by rank: the largest magnitude first, equal ones by position.
template <class T>
std::vector<std::size_t> sorted_positions(const std::vector<T>& values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](auto i, auto j) { return std::abs(values[i]) > std::abs(values[j]); });
  return order;
}

/// Ones where a rank of [first, last) stands.
template <class T>
std::vector<T> select(const std::vector<T>& values, std::int64_t first, std::int64_t last, std::int64_t tile,
                      std::int64_t unit) {
  RankSearch<T> search(1, 2);
  search.set_rank(0, 0, last);
  search.set_rank(0, 1, first);
  RankBand<T> band(search);
  const auto total = static_cast<std::int64_t>(values.size());
  const auto num_units = (total + unit - 1) / unit;
  const auto over_tiles = [&](auto body) {
    for (std::int64_t u = num_units; u-- > 0;) {
      for (std::int64_t begin = u * unit; begin < std::min(total, (u + 1) * unit); begin += tile) {
        const auto count = std::min({tile, (u + 1) * unit - begin, total - begin});
        body(u, begin, std::span(values).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count)));
      }
    }
  };
  for (int pass = 0; pass < RankSearch<T>::kPasses && search.wants(pass); ++pass) {
    std::vector<std::uint32_t> counts(search.num_counts());
    over_tiles([&](auto, auto, std::span<const T> part) { search.gather(pass, 0, part, counts); });
    search.finish(pass, std::vector<std::uint64_t>(counts.begin(), counts.end()));
  }
  if (band.wants_ties()) {
    std::vector<double> unit_sums(static_cast<std::size_t>(num_units) * 2);
    over_tiles([&](auto u, auto, std::span<const T> part) {
      band.gather_ties(0, part, std::span(unit_sums).subspan(static_cast<std::size_t>(u) * 2, 2));
    });
    const std::vector<double> sums(2);
    band.finish_ties({.sums = sums, .unit_sums = unit_sums, .counts = {}});
  }
  std::vector<T> kept(values.size(), T{1});
  std::int64_t open = -1;
  std::vector<std::int64_t> state(2);
  over_tiles([&](auto u, auto begin, std::span<const T> part) {
    if (u != open) state.assign(2, 0);
    open = u;
    band.keep(0, u, part, kept.data() + begin, state);
  });
  return kept;
}

}  // namespace

TEMPLATE_TEST_CASE("selection keeps what a stable sort keeps", "[merging][law]", float, double) {
  using T = TestType;
  const auto kind = GENERATE(Kind::kNormal, Kind::kFewValues, Kind::kAllEqual, Kind::kZeros, Kind::kBrainFloats);
  for (const std::int64_t n : {1, 2, 7, 64, 1000, 5003}) {
    const auto values = values_of<T>(kind, n, static_cast<std::uint64_t>(n));
    const auto order = sorted_positions(values);
    for (const auto& [first, last] : {std::pair<std::int64_t, std::int64_t>{0, 0},
                                      {0, 1},
                                      {0, n / 3},
                                      {0, n / 2},
                                      {0, n - 1},
                                      {0, n},
                                      {0, n + 5},
                                      {n / 10, n / 2},
                                      {n / 3, n / 3},
                                      {1, n},
                                      {n / 2, n - 1}}) {
      std::vector<T> expected(values.size());
      for (auto rank = first; rank < std::min(last, n); ++rank) expected[order[static_cast<std::size_t>(rank)]] = T{1};
      for (const auto& [tile, unit] :
           {std::pair<std::int64_t, std::int64_t>{1 << 14, 1 << 20}, {3, 10}, {100, 1000}, {257, 700}}) {
        INFO("kind " << static_cast<int>(kind) << ", " << n << " values, ranks " << first << " to " << last
                     << ", tiles of " << tile);
        CHECK((select(values, first, last, tile, unit) == expected));
      }
    }
  }
}

TEST_CASE("not-a-number ranks before everything and stays one entry", "[merging][law]") {
  std::vector<float> values{1.0f, -3.0f, NAN, 2.0f, INFINITY};
  CHECK(select(values, 0, 1, 2, 4) == std::vector<float>{0, 0, 1, 0, 0});
  CHECK(select(values, 0, 2, 2, 4) == std::vector<float>{0, 0, 1, 0, 1});
  CHECK(select(values, 0, 3, 2, 4) == std::vector<float>{0, 1, 1, 0, 1});
}

}  // namespace mergex::merging
