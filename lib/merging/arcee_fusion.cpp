#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "merging/methods.h"
#include "merging/selection.h"

namespace mergex::merging {
namespace {

/// Takes over the entries of the other model whose change is important: its size times the divergence of the rows that
/// they stand in, read as logits. Important is what lies 1.5 interquartile ranges above the median. Quantiles are
/// exact.
template <class T>
class ArceeFusionMerge final : public TensorMerge<T> {
 public:
  explicit ArceeFusionMerge(const TensorContext& context)
      : row_length_(context.row_length()), divergences_(static_cast<std::size_t>(context.num_rows())) {
    const auto n = context.num_elements();
    for (std::size_t q = 0; q < kQuantiles.size(); ++q) {
      // The ranks of a search count from the largest.
      search_.set_rank(0, q, n == 0 ? 0 : n - static_cast<std::int64_t>(kQuantiles[q] * static_cast<double>(n - 1)));
    }
  }

  typename TensorMerge<T>::Needs needs() const override {
    return {.passes = RankSearch<T>::kPasses, .whole_rows = true, .counts = search_.num_counts(), .scratch = 1};
  }

  void gather(int pass, const Tile<T>& tile, const Workspace<T>& workspace) const override {
    for (std::int64_t row = 0; row < tile.count; row += row_length_) {
      const auto index = static_cast<std::size_t>((tile.begin + row) / row_length_);
      if (pass == 0) divergences_[index] = divergence(tile.base + row, tile.inputs[0] + row);
      set_importance(tile, row, workspace.scratch.data());
      search_.gather(pass, 0, {workspace.scratch.data(), static_cast<std::size_t>(row_length_)}, workspace.counts);
    }
  }

  void finish(int pass, const Totals& totals) override {
    search_.finish(pass, totals.counts);
    const auto quantile = [&](std::size_t q) {
      return static_cast<double>(std::bit_cast<T>(search_.boundary(0, q).magnitude));
    };
    threshold_ = quantile(1) + 1.5 * (quantile(2) - quantile(0));
  }

  void merge(const Tile<T>& tile, const Workspace<T>& workspace, T* out) const override {
    T* importance = workspace.scratch.data();
    for (std::int64_t row = 0; row < tile.count; row += row_length_) {
      set_importance(tile, row, importance);
      const T* a = tile.base + row;
      const T* b = tile.inputs[0] + row;
      for (std::int64_t i = 0; i < row_length_; ++i) {
        out[row + i] = static_cast<double>(importance[i]) >= threshold_ ? a[i] + (b[i] - a[i]) : a[i];
      }
    }
  }

  void report(io::Json& entry) const override { entry["threshold"] = threshold_; }

 private:
  static constexpr std::array kQuantiles{0.25, 0.5, 0.75};

  struct Softmax {
    double largest, sum;
    double operator()(double logit) const { return std::exp(logit - largest) / sum + 1e-8; }
  };
  Softmax softmax_of(const T* row) const {
    Softmax s{static_cast<double>(*std::max_element(row, row + row_length_)), 0.0};
    for (std::int64_t i = 0; i < row_length_; ++i) s.sum += std::exp(static_cast<double>(row[i]) - s.largest);
    return s;
  }

  /// Kullback-Leibler, from the other model's row to the base's.
  double divergence(const T* base, const T* other) const {
    const auto p = softmax_of(other), q = softmax_of(base);
    double sum = 0.0;
    for (std::int64_t i = 0; i < row_length_; ++i) {
      const double chance = p(static_cast<double>(other[i]));
      sum += chance * std::log(chance / q(static_cast<double>(base[i])));
    }
    return sum;
  }

  void set_importance(const Tile<T>& tile, std::int64_t row, T* importance) const {
    const double factor = divergences_[static_cast<std::size_t>((tile.begin + row) / row_length_)];
    for (std::int64_t i = 0; i < row_length_; ++i) {
      const double change = static_cast<double>(tile.inputs[0][row + i]) - static_cast<double>(tile.base[row + i]);
      importance[i] = static_cast<T>(std::abs(change) * factor);
    }
  }

  std::int64_t row_length_;
  // Found in the first pass and kept, as exponentials are what takes time. Every row belongs to one thread.
  mutable std::vector<double> divergences_;
  RankSearch<T> search_{1, kQuantiles.size()};
  double threshold_ = 0.0;
};

template <class T>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState*) {
  return std::make_unique<ArceeFusionMerge<T>>(context);
}

}  // namespace

constinit const Method kArceeFusion{.name = "arcee_fusion",
                                    .summary = "take over the other model's most important changes",
                                    .paper = "mergekit (Arcee Fusion)",
                                    .base = Method::Base::kRequired,
                                    .max_inputs = 1,
                                    .make_float = make<float>,
                                    .make_double = make<double>};

}  // namespace mergex::merging
