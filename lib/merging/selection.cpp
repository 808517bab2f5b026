#include "merging/selection.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace mergex::merging {
namespace {

constexpr std::size_t kDigits = 65536;
constexpr std::size_t kFirstDigits = 32768;

/// Position of a pass's digit: 16 bits each, the last at bit 0.
template <class T>
int digit_shift(int pass) {
  return 16 * (RankSearch<T>::kPasses - 1 - pass);
}

/// Length of the part of `keys` that holds the first `ties` values of this magnitude; all where there are fewer.
template <class T>
std::size_t end_of_ties(std::span<const T> keys, Bits<T> magnitude, std::int64_t ties) {
  const auto& k = span_kernels<T>();
  if (k.count_equal(static_cast<std::int64_t>(keys.size()), keys.data(), magnitude) < ties) return keys.size();
  std::size_t end = 0;
  while (ties > 0) ties -= k.count_equal(1, keys.data() + end++, magnitude);
  return end;
}

// A sample's rank is off by its standard deviation times this in one tensor of some thousands.
constexpr double kDeviations = 4.0;
constexpr std::int64_t kMaxListed = std::int64_t{1} << 21;  // of a boundary, in all units of all but the largest tensors
constexpr std::int64_t kFewElements = std::int64_t{1} << 18, kFewListed = std::int64_t{1} << 14, kLeastListed = 1024;

/// The `rank` largest comes last of those, from 1 on. Rearranges `keys`.
std::uint64_t key_of_rank(std::vector<std::uint64_t>& keys, std::int64_t rank) {
  const auto at = keys.begin() + (rank - 1);
  std::ranges::nth_element(keys, at, std::greater{});
  return *at;
}

}  // namespace

template <class T>
RankSearch<T>::RankSearch(std::size_t num_streams, std::size_t ranks_per_stream, int num_digits)
    : ranks_per_stream_(ranks_per_stream), num_digits_(num_digits), boundaries_(num_streams * ranks_per_stream) {}

template <class T>
void RankSearch<T>::set_rank(std::size_t stream, std::size_t slot, std::int64_t rank) {
  auto& b = boundaries_[stream * ranks_per_stream_ + slot];
  b = {};
  b.rank = rank;
  b.found = rank > 0 && rank != std::numeric_limits<std::int64_t>::max();
  b.magnitude = rank > 0 ? 0 : ~Bits<T>{0};
}

template <class T>
bool RankSearch<T>::wants(int pass) const {
  return pass < num_digits_ && std::ranges::any_of(boundaries_, [](const auto& b) { return b.found; });
}

template <class T>
void RankSearch<T>::gather(int pass, std::size_t stream, std::span<const T> values,
                           std::span<std::uint32_t> counts) const {
  const auto& k = span_kernels<T>();
  const auto count = static_cast<std::int64_t>(values.size());
  if (pass == 0) {
    k.count_first_digit(count, values.data(), counts.data() + stream * kDigits);
    return;
  }
  const int shift = digit_shift<T>(pass);
  for (std::size_t slot = 0; slot < ranks_per_stream_; ++slot) {
    const auto index = stream * ranks_per_stream_ + slot;
    const auto& b = boundaries_[index];
    if (!b.found) continue;
    k.count_next_digit(count, values.data(), shift, b.magnitude >> shift >> 16, counts.data() + index * kDigits);
  }
}

template <class T>
void RankSearch<T>::finish(int pass, std::span<const std::uint64_t> counts) {
  for (std::size_t index = 0; index < boundaries_.size(); ++index) {
    auto& b = boundaries_[index];
    if (!b.found) continue;
    const auto* table = counts.data() + (pass == 0 ? index / ranks_per_stream_ : index) * kDigits;
    // The first digit is counted in two tables (span_kernels.h).
    const auto count_of = [&](std::size_t digit) {
      return static_cast<std::int64_t>(pass == 0 ? table[digit] + table[kFirstDigits + digit] : table[digit]);
    };
    std::size_t digit = pass == 0 ? kFirstDigits : kDigits;
    std::int64_t here = 0;
    bool reached = false;
    while (digit > 0 && !reached) {
      here = count_of(--digit);
      reached = b.above + here >= b.rank;
      if (!reached) b.above += here;
    }
    if (!reached) {  // beyond the stream's end
      b.found = false;
      b.magnitude = 0;
      continue;
    }
    b.magnitude |= static_cast<Bits<T>>(digit) << digit_shift<T>(pass);
    b.ties = here;
    b.kept_ties = b.rank - b.above;
  }
}

template <class T>
void RankSearch<T>::keep_all_ties(std::size_t stream) {
  for (std::size_t slot = 0; slot < ranks_per_stream_; ++slot) {
    auto& b = boundaries_[stream * ranks_per_stream_ + slot];
    b.kept_ties = b.ties;
  }
}

template <class T>
RankBracket<T>::RankBracket(const RankSearch<T>& search, std::int64_t num_elements)
    : search_(&search),
      num_elements_(num_elements),
      max_listed_(static_cast<std::size_t>(
          std::clamp(kMaxListed / (1 + num_elements / kFewElements), kLeastListed, kFewListed))),
      windows_(search.num_streams() * search.ranks_per_stream()) {}

template <class T>
void RankBracket<T>::gather_sample(std::size_t stream, std::span<const T> values,
                                   std::span<std::vector<std::uint64_t>> lists) const {
  auto& list = lists[stream * search_->ranks_per_stream()];
  for (const T x : values) list.push_back(std::bit_cast<Bits<T>>(std::abs(x)));
}

template <class T>
void RankBracket<T>::finish_sample(const Totals& totals) {
  const auto slots = search_->ranks_per_stream();
  for (std::size_t stream = 0; stream < search_->num_streams(); ++stream) {
    std::vector<std::uint64_t> sample;
    for (std::size_t i = stream * slots; i < totals.unit_lists.size(); i += num_lists()) {
      sample.insert(sample.end(), totals.unit_lists[i].begin(), totals.unit_lists[i].end());
    }
    const auto size = static_cast<std::int64_t>(sample.size());
    for (std::size_t slot = 0; slot < slots; ++slot) {
      const auto& b = search_->boundary(stream, slot);
      auto& window = windows_[stream * slots + slot];
      window = {.low = 0, .pivot = 0, .high = std::numeric_limits<Bits<T>>::max() >> 1};
      if (!b.found || size == 0) continue;
      const double share = std::min(1.0, static_cast<double>(b.rank) / static_cast<double>(num_elements_));
      const double middle = share * static_cast<double>(size);
      const double width = 1.0 + kDeviations * std::sqrt(middle * (1.0 - share));
      const auto first = static_cast<std::int64_t>(middle - width), last = static_cast<std::int64_t>(middle + width);
      const auto key = [&](std::int64_t rank) { return static_cast<Bits<T>>(key_of_rank(sample, rank)); };
      if (first >= 1) window.high = key(first);
      if (last <= size) window.low = key(last);
      window.pivot = key(std::clamp<std::int64_t>(static_cast<std::int64_t>(std::ceil(middle)), 1, size));
    }
  }
}

template <class T>
void RankBracket<T>::gather(std::size_t stream, std::span<const T> values, std::span<double> sums,
                            std::span<std::vector<std::uint64_t>> lists) const {
  std::array<Bits<T>, kBlock + kLanes> others;
  for (std::size_t slot = 0; slot < search_->ranks_per_stream(); ++slot) {
    if (!search_->boundary(stream, slot).found) continue;
    const auto index = stream * search_->ranks_per_stream() + slot;
    const auto& window = windows_[index];
    for (std::size_t begin = 0; begin < values.size(); begin += kBlock) {
      const auto count = std::min<std::int64_t>(kBlock, static_cast<std::int64_t>(values.size() - begin));
      const auto found = span_kernels<T>().count_around(count, values.data() + begin, window.low, window.pivot,
                                                        window.high, others.data());
      sums[2 * index] += static_cast<double>(found.above);
      sums[2 * index + 1] += static_cast<double>(found.equal);
      if (lists[index].size() < max_listed_) {
        lists[index].insert(lists[index].end(), others.begin(), others.begin() + found.others);
      }
    }
  }
}

template <class T>
std::vector<double> RankBracket<T>::finish(const Totals& totals, RankSearch<T>& search) const {
  const auto slots = search.ranks_per_stream();
  const auto num_units = totals.unit_lists.size() / num_lists();
  std::vector<double> ties(num_units * num_lists());
  std::vector<RankBoundary<T>> boundaries;
  for (std::size_t index = 0; index < num_lists(); ++index) {
    auto b = search.boundary(index / slots, index % slots);
    boundaries.push_back(b);
    if (!b.found) continue;
    const auto pivot = windows_[index].pivot;
    const auto equal = static_cast<std::int64_t>(totals.sums[2 * index + 1]);
    std::vector<std::uint64_t> larger, smaller;
    for (std::size_t unit = 0; unit < num_units; ++unit) {
      const auto& list = totals.unit_lists[unit * num_lists() + index];
      if (list.size() >= max_listed_) return {};
      for (const auto key : list) (key > pivot ? larger : smaller).push_back(key);
    }
    const auto num_larger = static_cast<std::int64_t>(larger.size());
    b.above = static_cast<std::int64_t>(totals.sums[2 * index]);
    auto rank = b.rank - b.above;  // within the window
    if (rank <= 0 || rank > num_larger + equal + static_cast<std::int64_t>(smaller.size())) return {};
    // Within what the window has above the pivot, at the pivot, or below.
    const auto settle = [&](std::vector<std::uint64_t>& keys) {
      b.magnitude = static_cast<Bits<T>>(key_of_rank(keys, rank));
      b.above += std::ranges::count_if(keys, [&](auto key) { return key > b.magnitude; });
      b.ties = std::ranges::count(keys, std::uint64_t{b.magnitude});
      for (std::size_t unit = 0; unit < num_units; ++unit) {
        ties[unit * num_lists() + index] = static_cast<double>(
            std::ranges::count(totals.unit_lists[unit * num_lists() + index], std::uint64_t{b.magnitude}));
      }
    };
    if (rank <= num_larger) {
      settle(larger);
    } else if (rank <= num_larger + equal) {
      b.magnitude = pivot;
      b.above += num_larger;
      b.ties = equal;
      for (std::size_t unit = 0; unit < num_units; ++unit) {
        ties[unit * num_lists() + index] = totals.unit_sums[unit * totals.sums.size() + 2 * index + 1];
      }
    } else {
      rank -= num_larger + equal;
      b.above += num_larger + equal;
      settle(smaller);
    }
    b.kept_ties = b.rank - b.above;
    boundaries.back() = b;
  }
  for (std::size_t index = 0; index < num_lists(); ++index) {
    search.set_boundary(index / slots, index % slots, boundaries[index]);
  }
  return ties;
}

template <class T>
bool RankBand<T>::wants_ties() const {
  for (std::size_t s = 0; s < search_->num_streams(); ++s) {
    for (std::size_t slot = 0; slot < search_->ranks_per_stream(); ++slot) {
      if (search_->boundary(s, slot).splits_ties()) return true;
    }
  }
  return false;
}

template <class T>
void RankBand<T>::gather_ties(std::size_t stream, std::span<const T> keys, std::span<double> sums) const {
  for (std::size_t slot = 0; slot < search_->ranks_per_stream(); ++slot) {
    const auto& b = search_->boundary(stream, slot);
    if (!b.splits_ties()) continue;
    sums[stream * search_->ranks_per_stream() + slot] += static_cast<double>(
        span_kernels<T>().count_equal(static_cast<std::int64_t>(keys.size()), keys.data(), b.magnitude));
  }
}

template <class T>
void RankBand<T>::finish_ties(const Totals& totals) {
  ties_here_.assign(num_sums(), 0);
  ties_before_.assign(num_sums(), 0);
  ties_before_unit_.clear();
  for (std::size_t unit = 0; unit < totals.unit_sums.size(); unit += totals.sums.size()) {
    for (std::size_t boundary = 0; boundary < num_sums(); ++boundary) {
      ties_before_unit_.push_back(ties_here_[boundary]);
      ties_here_[boundary] += static_cast<std::int64_t>(totals.unit_sums[unit + boundary]);
    }
  }
}

template <class T>
std::int64_t RankBand<T>::ties_here(std::size_t boundary) const {
  return ties_here_.empty() ? 0 : ties_here_[boundary];
}

template <class T>
void RankBand<T>::set_ties_before(std::size_t boundary, std::int64_t ties) {
  if (!ties_before_.empty()) ties_before_[boundary] = ties;
}

template <class T>
void RankBand<T>::keep(std::size_t stream, std::int64_t unit, std::span<const T> keys, T* values,
                       std::span<std::int64_t> state) const {
  const auto& k = span_kernels<T>();
  const auto slots = search_->ranks_per_stream();
  for (std::size_t begin = 0; begin < keys.size();) {
    // As far as no boundary's kept ties end: there one bound of magnitudes says all.
    auto run = keys.subspan(begin);
    Bits<T> bounds[2] = {0, ~Bits<T>{0}};  // at least the first, below the second
    for (std::size_t slot = 0; slot < slots; ++slot) {
      const auto& b = search_->boundary(stream, slot);
      bounds[slot] = b.magnitude;
      if (!b.splits_ties()) continue;
      const auto left = ties_left(stream * slots + slot, unit, state);
      if (left <= 0) {
        ++bounds[slot];
      } else {
        run = run.first(end_of_ties(run, b.magnitude, left));
      }
    }
    const auto count = static_cast<std::int64_t>(run.size());
    for (std::size_t slot = 0; slot < slots; ++slot) {
      const auto& b = search_->boundary(stream, slot);
      // What comes after the last kept tie need not be counted.
      if (b.splits_ties() && bounds[slot] == b.magnitude) {
        state[stream * slots + slot] += k.count_equal(count, run.data(), b.magnitude);
      }
    }
    k.keep_between(count, run.data(), bounds[0], bounds[1], values + begin);
    begin += run.size();
  }
}

template <class T>
std::int64_t RankBand<T>::ties_left(std::size_t boundary, std::int64_t unit,
                                    std::span<const std::int64_t> state) const {
  const auto before =
      ties_before_[boundary] + ties_before_unit_[static_cast<std::size_t>(unit) * num_sums() + boundary];
  return search_->boundary(boundary / search_->ranks_per_stream(), boundary % search_->ranks_per_stream()).kept_ties -
         before - state[boundary];
}

template class RankSearch<float>;
template class RankSearch<double>;
template class RankBracket<float>;
template class RankBracket<double>;
template class RankBand<float>;
template class RankBand<double>;

}  // namespace mergex::merging
