#pragma once

#include <functional>
#include <limits>
#include <memory>

#include "merging/selection.h"
#include "merging/task_vectors.h"

namespace mergex::merging {

/// Ranks [first, last) of a task vector's magnitudes, the largest first, that are kept.
struct RankBandSize {
  static constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();
  std::int64_t first = 0, last = 0;
};

/// trunc(fraction * count), as C and Python have it; everything from a fraction of 1 on.
std::int64_t portion(double fraction, std::int64_t count);

/// Keeps a band of ranks of each tensor's task vectors. @param band  of an input, for a number of elements
template <class T>
std::unique_ptr<Sparsifier<T>> keep_band(
    const TensorContext& context,
    const std::function<RankBandSize(const TensorContext::Input&, std::int64_t num_elements)>& band);

/// Ranks task vectors over all tensors of a model; ties by the order of tensors, then of elements. Tensors join in
/// their order, before the first pass.
class GlobalTrim {
 public:
  explicit GlobalTrim(std::size_t num_inputs);

  void join(const TensorContext& context, RankBand<float>& band);
  void add(std::span<const std::uint64_t> counts);
  /// After each pass of all tensors.
  void finish(int pass);
  const RankSearch<float>& search() const { return search_; }

 private:
  RankSearch<float> search_;
  std::vector<double> density_;
  std::int64_t num_elements_ = 0;
  bool keep_all_ties_ = false;  // FusionBench's, with one rank more
  std::vector<std::uint64_t> counts_;
  std::vector<RankBand<float>*> bands_;
};

/// Keeps the part of the tensor that belongs to the largest of the whole model.
std::unique_ptr<Sparsifier<float>> trim_globally(const TensorContext& context, GlobalTrim& trim);

}  // namespace mergex::merging
