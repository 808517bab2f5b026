#include "merging/selection.h"

#include <algorithm>
#include <limits>

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
template class RankBand<float>;
template class RankBand<double>;

}  // namespace mergex::merging
