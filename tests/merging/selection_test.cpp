#include "merging/selection.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "core/random.h"
#include "merging/magnitude.h"
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

TEMPLATE_TEST_CASE("a bracket finds what the search finds, or says that its sample missed", "[merging][law]", float, double) {
  using T = TestType;
  const auto kind = GENERATE(Kind::kNormal, Kind::kFewValues, Kind::kAllEqual, Kind::kZeros, Kind::kBrainFloats);
  constexpr std::int64_t kCount = 50'000, kUnitLength = 20'000;
  const auto values = values_of<T>(kind, kCount, 3);
  const auto order = sorted_positions(values);
  // A sample of every seventh value, and one of the smallest values only.
  const auto misled = GENERATE(false, true);
  std::vector<T> sample;
  for (std::size_t i = 0; i < order.size(); i += 7) sample.push_back(misled ? values[order[order.size() - 1 - i / 7]] : values[i]);

  for (const std::int64_t rank : {std::int64_t{1}, std::int64_t{500}, kCount / 3, kCount - 1, kCount}) {
    RankSearch<T> search(1);
    search.set_rank(0, 0, rank);
    RankBracket<T> bracket(search, kCount);
    std::vector<std::vector<std::uint64_t>> lists(3);
    bracket.gather_sample(0, sample, std::span(lists).first(1));
    bracket.finish_sample({.sums = {}, .unit_sums = {}, .counts = {}, .unit_lists = lists});
    lists.assign(3, {});
    std::vector<double> unit_sums(6), sums(2);
    for (std::size_t unit = 0; unit < 3; ++unit) {
      const auto begin = unit * static_cast<std::size_t>(kUnitLength);
      const auto length = std::min<std::size_t>(static_cast<std::size_t>(kUnitLength), values.size() - begin);
      bracket.gather(0, std::span(values).subspan(begin, length), std::span(unit_sums).subspan(2 * unit, 2),
                     std::span(lists).subspan(unit, 1));
      sums[0] += unit_sums[2 * unit];
      sums[1] += unit_sums[2 * unit + 1];
    }
    const auto ties = bracket.finish({.sums = sums, .unit_sums = unit_sums, .counts = {}, .unit_lists = lists}, search);
    INFO("kind " << static_cast<int>(kind) << ", rank " << rank);
    if (misled && (kind == Kind::kNormal) && rank <= kCount / 3) CHECK(ties.empty());
    if (!misled) REQUIRE(ties.size() == 3);
    if (ties.empty()) continue;

    const auto& found = search.boundary(0);
    const T threshold = std::abs(values[order[static_cast<std::size_t>(rank - 1)]]);
    CHECK(std::bit_cast<T>(found.magnitude) == threshold);
    CHECK(found.above == std::ranges::count_if(values, [&](T x) { return std::abs(x) > threshold; }));
    CHECK(found.ties == std::ranges::count_if(values, [&](T x) { return std::abs(x) == threshold; }));
    CHECK(found.kept_ties == rank - found.above);
    for (std::int64_t unit = 0; unit < 3; ++unit) {
      const auto first = values.begin() + unit * kUnitLength;
      const auto last = values.begin() + std::min(kCount, (unit + 1) * kUnitLength);
      const auto expected = std::count_if(first, last, [&](T x) { return std::abs(x) == threshold; });
      CHECK(static_cast<std::int64_t>(ties[static_cast<std::size_t>(unit)]) == expected);
    }
  }
}

/// Ones where a task vector of these values is kept; `sample` is what the first pass sees.
std::vector<float> kept_of(const std::vector<float>& values, const std::vector<float>& sample) {
  TensorContext context;
  context.shape = {static_cast<std::int64_t>(values.size())};
  context.inputs.resize(1);
  const auto half = [](const TensorContext::Input&, std::int64_t n) { return RankBandSize{.first = 0, .last = n / 2}; };
  const auto sparsifier = keep_band<float>(context, half);
  const auto needs = sparsifier->needs();
  for (int pass = 0; pass < needs.passes; ++pass) {
    if (!sparsifier->wants(pass)) continue;
    const auto& seen = pass == 0 ? sample : values;
    std::vector<double> sums(needs.sums);
    std::vector<std::uint32_t> counts(needs.counts);
    std::vector<std::vector<std::uint64_t>> lists(needs.lists);
    sparsifier->gather(pass, {.count = static_cast<std::int64_t>(seen.size()), .sums = sums, .counts = counts, .lists = lists}, seen.data());
    const std::vector<std::uint64_t> wide(counts.begin(), counts.end());
    sparsifier->finish(pass, {.sums = sums, .unit_sums = sums, .counts = wide, .unit_lists = lists});
  }
  std::vector<std::int64_t> state(needs.state);
  auto kept = values;
  sparsifier->keep({.count = static_cast<std::int64_t>(values.size()), .state = state}, kept.data());
  return kept;
}

TEST_CASE("a sample that misleads changes nothing that is kept", "[merging][law]") {
  const auto kind = GENERATE(Kind::kNormal, Kind::kFewValues, Kind::kAllEqual, Kind::kZeros, Kind::kBrainFloats);
  const auto values = values_of<float>(kind, 40'000, 5);
  const auto order = sorted_positions(values);
  auto expected = values;
  for (std::size_t i = values.size() / 2; i < order.size(); ++i) expected[order[i]] = 0.0f;
  CHECK(kept_of(values, values) == expected);
  CHECK(kept_of(values, std::vector<float>(1000, 1e30f)) == expected);
  CHECK(kept_of(values, std::vector<float>(1000, 1e-30f)) == expected);
  CHECK(kept_of(values, {}) == expected);
}

TEST_CASE("not-a-number ranks before everything and stays one entry", "[merging][law]") {
  std::vector<float> values{1.0f, -3.0f, NAN, 2.0f, INFINITY};
  CHECK(select(values, 0, 1, 2, 4) == std::vector<float>{0, 0, 1, 0, 0});
  CHECK(select(values, 0, 2, 2, 4) == std::vector<float>{0, 0, 1, 0, 1});
  CHECK(select(values, 0, 3, 2, 4) == std::vector<float>{0, 1, 1, 0, 1});
}

}  // namespace mergex::merging
