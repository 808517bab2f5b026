#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "merging/magnitude.h"
#include "merging/methods.h"

namespace mergex::merging {
namespace {

constexpr Parameter kParameters[] = {
    {.name = "select_topk",
     .scope = Parameter::Scope::kShared,
     .kind = Parameter::Kind::kNumber,
     .fallback = 1.0,
     .range = kFraction,
     .summary = "fraction of the elements with differing task vectors that is kept, those "
                "with the largest variance"},
    kInt8Mask};

/// Select by variance, calculate coefficients from mean squares, erase what lost the vote.
template <class T>
class SceMerge final : public TensorMerge<T> {
 public:
  explicit SceMerge(const TensorContext& context)
      : num_inputs_(context.inputs.size()),
        num_elements_(static_cast<double>(context.num_elements())),
        top_(context.shared["select_topk"]),
        absolute_(context.dialect == Dialect::kMergekit),
        coefficients_(num_inputs_) {
    // The rank follows from the number of variances that are not 0: a first pass counts them.
    search_.set_rank(0, 0, top_ >= 1.0 ? RankBandSize::kAll : top_ <= 0.0 ? 0 : 1);
  }

  typename TensorMerge<T>::Needs needs() const override {
    return {.passes = kSquaresPass + 1,
            .sums = std::max(num_inputs_ * kLanes, band_.num_sums() + 1),
            .counts = search_.num_counts(),
            .state = band_.num_state(),
            .scratch = num_inputs_ + 2};
  }
  bool wants(int pass) const override {
    return pass == kSquaresPass || (pass == kTiesPass ? band_.wants_ties() : search_.wants(pass));
  }

  void gather(int pass, const Tile<T>& tile, const Workspace<T>& workspace) const override {
    over_blocks(tile, workspace, [&](std::int64_t begin, std::int64_t count, T* deltas) {
      take_differences(tile, begin, count, deltas);
      if (pass == kSquaresPass) {
        select(tile, workspace, count, deltas);
        for (std::size_t i = 0; i < num_inputs_; ++i) {
          const T* delta = deltas + static_cast<std::int64_t>(i) * count;
          span_kernels<T>().dot(count, (tile.begin + begin) % kLanes, delta, delta, nullptr,
                                workspace.sums.data() + i * kLanes);
        }
        return;
      }
      std::array<T, kBlock> variances;
      const auto keys = variances_of(count, deltas, variances);
      if (pass == kTiesPass) {
        band_.gather_ties(0, keys, workspace.sums);
      } else {
        search_.gather(pass, 0, keys, workspace.counts);
        if (pass == 0) workspace.sums[0] += static_cast<double>(span_kernels<T>().count_nonzero(count, keys.data()));
      }
    });
  }

  void finish(int pass, const Totals& totals) override {
    if (pass == kTiesPass) {
      band_.finish_ties(totals);
    } else if (pass < kTiesPass) {
      if (pass == 0) search_.set_rank(0, 0, portion(top_, static_cast<std::int64_t>(totals.sums[0])));
      search_.finish(pass, totals.counts);
    } else {
      calculate(totals.sums);
    }
  }

  void merge(const Tile<T>& tile, const Workspace<T>& workspace, T* out) const override {
    const auto& k = span_kernels<T>();
    const T smallest = absolute_ ? T(1e-6) : T{0};
    over_blocks(tile, workspace, [&](std::int64_t begin, std::int64_t count, T* deltas) {
      take_differences(tile, begin, count, deltas);
      select(tile, workspace, count, deltas);
      T* sum = deltas + static_cast<std::int64_t>(num_inputs_) * count;
      T* shares = sum + count;
      k.elect(count, static_cast<std::int64_t>(num_inputs_), deltas, count, coefficients_.data(), coefficients_.data(),
              false, sum, shares);
      for (std::int64_t i = 0; i < count; ++i) {
        const T share = std::max(shares[i], smallest);
        out[begin + i] = tile.base[begin + i] + (share == T{0} ? T{0} : sum[i] / share);
      }
    });
  }

  void report(io::Json& entry) const override { entry["coefficients"] = coefficients_; }

 private:
  static constexpr int kTiesPass = RankSearch<T>::kPasses, kSquaresPass = kTiesPass + 1;

  /// Calls body(offset in the tile, count, scratch).
  template <class Body>
  static void over_blocks(const Tile<T>& tile, const Workspace<T>& workspace, Body body) {
    for (std::int64_t begin = 0; begin < tile.count; begin += kBlock) {
      body(begin, std::min(kBlock, tile.count - begin), workspace.scratch.data());
    }
  }

  T* delta_of(T* deltas, std::size_t input, std::int64_t count) const {
    return deltas + static_cast<std::int64_t>(input) * count;
  }

  void take_differences(const Tile<T>& tile, std::int64_t begin, std::int64_t count, T* deltas) const {
    for (std::size_t i = 0; i < num_inputs_; ++i) {
      span_kernels<T>().difference(count, tile.inputs[i] + begin, tile.base + begin, delta_of(deltas, i, count));
    }
  }

  std::span<const T> variances_of(std::int64_t count, const T* deltas, std::array<T, kBlock>& variances) const {
    span_kernels<T>().variance(count, static_cast<std::int64_t>(num_inputs_), deltas, count, variances.data());
    return {variances.data(), static_cast<std::size_t>(count)};
  }

  void select(const Tile<T>& tile, const Workspace<T>& workspace, std::int64_t count, T* deltas) const {
    if (top_ >= 1.0) return;
    std::array<T, kBlock> variances;
    const auto keys = variances_of(count, deltas, variances);
    // Every input loses the same elements: a mask of ones, made once.
    std::array<T, kBlock> mask;
    std::fill_n(mask.begin(), count, T{1});
    band_.keep(0, tile.unit, keys, mask.data(), workspace.state);
    for (std::size_t i = 0; i < num_inputs_; ++i) {
      T* delta = delta_of(deltas, i, count);
      for (std::int64_t e = 0; e < count; ++e) delta[e] = mask[static_cast<std::size_t>(e)] != T{0} ? delta[e] : T{0};
    }
  }

  void calculate(std::span<const double> sums) {
    std::vector<double> squares;
    double total = 0.0;
    for (std::size_t i = 0; i < num_inputs_; ++i) {
      const double* lanes = sums.data() + i * kLanes;
      total += squares.emplace_back(std::accumulate(lanes, lanes + kLanes, 0.0) / num_elements_);
    }
    // mergekit compares with a number that most fine-tuned models stay below.
    const bool equal = absolute_ ? std::abs(total) < 1e-6 : total == 0.0;
    for (std::size_t i = 0; i < num_inputs_; ++i) {
      coefficients_[i] = static_cast<T>(equal ? 1.0 / static_cast<double>(num_inputs_) : squares[i] / total);
    }
  }

  std::size_t num_inputs_;
  double num_elements_, top_;
  bool absolute_;
  std::vector<T> coefficients_;
  RankSearch<T> search_{1};
  RankBand<T> band_{search_};
};

template <class T>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState*) {
  return std::make_unique<SceMerge<T>>(context);
}

}  // namespace

constinit const Method kSce{
    .name = "sce",
    .summary = "select by variance, weight models by the size of their changes, erase minority signs",
    .paper = "Wan et al. 2024, arXiv:2408.07990 (FuseChat)",
    .base = Method::Base::kRequired,
    .parameters = kParameters,
    .make_float = make<float>,
    .make_double = make<double>};

}  // namespace mergex::merging
