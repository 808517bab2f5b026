#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "merging/method.h"
#include "merging/span_kernels.h"

namespace mergex::merging {

/// Where a rank lies among the magnitudes of a stream of values, sorted from the largest; equal ones by their position.
/// The `rank` largest are those above `magnitude`, and of the `ties` values that equal it the first `kept_ties`.
template <class T>
struct RankBoundary {
  std::int64_t rank = 0;
  Bits<T> magnitude = 0;
  std::int64_t ties = 0, kept_ties = 0;
  std::int64_t above = 0;  ///< values that are larger
  bool found = false;      ///< the rank is one of the stream's; otherwise `magnitude` lets pass nothing or everything

  bool splits_ties() const { return found && kept_ties < ties; }
};

/// Finds the magnitudes at given ranks of several streams that are seen in pieces, in any order and more than once: a
/// histogram per digit of 16 bits, from the top (two passes for float, four for double). Exact, and in memory that does
/// not depend on the streams' length.
template <class T>
class RankSearch {
 public:
  static constexpr int kPasses = sizeof(T) / 2;

  /// @param num_digits  fewer than kPasses where the lower digits of all values are 0 (bfloat16: 1)
  explicit RankSearch(std::size_t num_streams, std::size_t ranks_per_stream = 1, int num_digits = kPasses);

  /// Before `finish(0)`. A rank of 0 or less stands before every value, one beyond the stream's
  /// length after; neither it nor INT64_MAX is looked for.
  void set_rank(std::size_t stream, std::size_t slot, std::int64_t rank);
  std::size_t num_counts() const { return boundaries_.size() * 65536; }
  /// Whether a stream of this search needs this pass.
  bool wants(int pass) const;
  void gather(int pass, std::size_t stream, std::span<const T> values, std::span<std::uint32_t> counts) const;
  /// @param counts  of all pieces, added up
  void finish(int pass, std::span<const std::uint64_t> counts);

  std::size_t num_streams() const { return boundaries_.size() / ranks_per_stream_; }
  std::size_t ranks_per_stream() const { return ranks_per_stream_; }
  const RankBoundary<T>& boundary(std::size_t stream, std::size_t slot = 0) const {
    return boundaries_[stream * ranks_per_stream_ + slot];
  }
  /// What was found of a boundary in another way.
  void set_boundary(std::size_t stream, std::size_t slot, const RankBoundary<T>& boundary) {
    boundaries_[stream * ranks_per_stream_ + slot] = boundary;
  }
  /// All values that equal the boundary's belong to the ranks before it.
  void keep_all_ties(std::size_t stream);

 private:
  std::size_t ranks_per_stream_;
  int num_digits_;
  std::vector<RankBoundary<T>> boundaries_;  // [streams, ranks_per_stream]
};

/// Finds the boundaries of a search in a sample of each stream and one pass (Floyd and Rivest 1975): the sample gives a
/// window of magnitudes that the boundary most probably lies in, and the pass counts what is above the window and keeps
/// what is inside. Exact; where the window misses, or holds too much to keep, the search's own passes are to follow.
template <class T>
class RankBracket {
 public:
  /// @param num_elements  of each stream
  RankBracket(const RankSearch<T>& search, std::int64_t num_elements);

  std::size_t num_lists() const { return windows_.size(); }
  std::size_t num_sums() const { return 2 * windows_.size(); }
  /// Length of a unit's list from which on it is of no use.
  std::size_t max_listed() const { return max_listed_; }

  void gather_sample(std::size_t stream, std::span<const T> values, std::span<std::vector<std::uint64_t>> lists) const;
  void finish_sample(const Totals& totals);
  void gather(std::size_t stream, std::span<const T> values, std::span<double> sums,
              std::span<std::vector<std::uint64_t>> lists) const;
  /// Moves the boundaries that were found into the search, the same as its own passes give.
  /// @return ties of each boundary in each unit, [units, boundaries]; empty where a boundary was not found
  std::vector<double> finish(const Totals& totals, RankSearch<T>& search) const;

 private:
  struct Window {
    Bits<T> low = 0, pivot = 0, high = 0;  // inclusive. The pivot's many equals are counted, not kept
  };

  const RankSearch<T>* search_;
  std::int64_t num_elements_;
  std::size_t max_listed_;
  std::vector<Window> windows_;  // by boundary
};

/// Keeps the values of a tensor whose rank lies in a band of a search that is done: behind boundary 1 (where the search
/// has two ranks per stream) and before boundary 0. Where a boundary runs through equal values, a pass counts them per
/// unit, so that each unit knows how many come before it.
template <class T>
class RankBand {
 public:
  explicit RankBand(const RankSearch<T>& search) : search_(&search) {}

  /// Lengths of the workspace's parts: sums of the counting pass, state of every pass that keeps.
  std::size_t num_sums() const { return search_->num_streams() * search_->ranks_per_stream(); }
  std::size_t num_state() const { return num_sums(); }

  bool wants_ties() const;
  void gather_ties(std::size_t stream, std::span<const T> keys, std::span<double> sums) const;
  /// @param totals  of the counting pass; the first `num_sums` of each unit are these
  void finish_ties(const Totals& totals);
  /// Ties of a boundary in this tensor, and how many lie in tensors before it.
  std::int64_t ties_here(std::size_t boundary) const;
  void set_ties_before(std::size_t boundary, std::int64_t ties);

  /// Sets values[i] to 0 where keys[i] is outside the band. Pieces of a unit in their order. `keys` may be `values`.
  void keep(std::size_t stream, std::int64_t unit, std::span<const T> keys, T* values,
            std::span<std::int64_t> state) const;

 private:
  /// Ties of a boundary that are still kept, from where a unit stands.
  std::int64_t ties_left(std::size_t boundary, std::int64_t unit, std::span<const std::int64_t> state) const;

  const RankSearch<T>* search_;
  std::vector<std::int64_t> ties_before_unit_;  // [units, boundaries], in this tensor
  std::vector<std::int64_t> ties_here_, ties_before_;
};

}  // namespace mergex::merging
