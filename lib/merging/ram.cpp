#include <algorithm>
#include <array>
#include <cmath>

#include "merging/methods.h"
#include "merging/span_kernels.h"

namespace mergex::merging {
namespace {

constexpr Parameter kEpsilon{.name = "epsilon",
                             .scope = Parameter::Scope::kShared,
                             .kind = Parameter::Kind::kNumber,
                             .fallback = 1e-5,
                             .range = {.at_least = 0.0},
                             .summary = "entries of a task vector up to this size count as unchanged"};
constexpr Parameter kParameters[] = {kEpsilon};
constexpr Parameter kPlusParameters[] = {kEpsilon,
                                         {.name = "r",
                                          .scope = Parameter::Scope::kShared,
                                          .kind = Parameter::Kind::kNumber,
                                          .fallback = 0.1,
                                          .summary = "how much entries that only one model changed are amplified"},
                                         {.name = "alpha",
                                          .scope = Parameter::Scope::kShared,
                                          .kind = Parameter::Kind::kNumber,
                                          .fallback = 0.2,
                                          .range = {.at_least = 0.0},
                                          .summary = "largest ratio of shared to unique entries that counts"}};

/// Entries that one model changed are added, those that several changed are averaged. With amplification, a model's own
/// entries count more the more it shares with others: a pass counts both per tensor.
template <class T>
class RamMerge final : public TensorMerge<T> {
 public:
  RamMerge(const TensorContext& context, bool amplifies)
      : epsilon_(static_cast<T>(context.shared["epsilon"])), amplification_(context.inputs.size(), T{1}) {
    if (amplifies) {
      passes_ = 1;
      r_ = context.shared["r"];
      alpha_ = context.shared["alpha"];
    }
  }

  typename TensorMerge<T>::Needs needs() const override {
    return {.passes = passes_, .sums = passes_ == 0 ? 0 : 2 * amplification_.size()};
  }

  void gather(int, const Tile<T>& tile, const Workspace<T>& workspace) const override {
    for (std::int64_t e = 0; e < tile.count; ++e) {
      const auto is_on = [&](std::size_t i) { return is_active(tile.inputs[i][e] - tile.base[e], epsilon_); };
      int active = 0;
      for (std::size_t i = 0; i < tile.inputs.size(); ++i) active += is_on(i) ? 1 : 0;
      for (std::size_t i = 0; i < tile.inputs.size(); ++i) {
        if (is_on(i)) workspace.sums[2 * i + (active > 1 ? 1 : 0)] += 1.0;
      }
    }
  }

  void finish(int, const Totals& totals) override {
    for (std::size_t i = 0; i < amplification_.size(); ++i) {
      const double unique = totals.sums[2 * i], shared = totals.sums[2 * i + 1];
      const double ratio = shared / std::max(unique, static_cast<double>(epsilon_));
      // Nothing of its own and nothing shared: 0 / 0 where epsilon is 0.
      amplification_[i] = static_cast<T>(1.0 + r_ * (shared == 0.0 ? 0.0 : std::clamp(ratio, 0.0, alpha_)));
    }
  }

  void merge(const Tile<T>& tile, const Workspace<T>&, T* out) const override {
    std::array<T, kBlock> sum, own, active;
    for (std::int64_t begin = 0; begin < tile.count; begin += kBlock) {
      const auto count = static_cast<std::size_t>(std::min(kBlock, tile.count - begin));
      sum.fill(T{0});
      own.fill(T{0});
      active.fill(T{0});
      const T* base = tile.base + begin;
      for (std::size_t i = 0; i < tile.inputs.size(); ++i) {
        const T* x = tile.inputs[i] + begin;
        const T amplification = amplification_[i], epsilon = epsilon_;
        for (std::size_t e = 0; e < count; ++e) {
          const T delta = x[e] - base[e];
          const T is_on = is_active(delta, epsilon) ? T{1} : T{0};  // a factor, as that is faster than a branch
          sum[e] += is_on * delta;
          own[e] += is_on * (amplification * delta);
          active[e] += is_on;
        }
      }
      for (std::size_t e = 0; e < count; ++e) {
        const T mean = sum[e] / std::max(active[e], T{1}), only = own[e];
        out[begin + static_cast<std::int64_t>(e)] = base[e] + (active[e] > T{1} ? mean : only);
      }
    }
  }

  void report(io::Json& entry) const override {
    if (passes_ > 0) entry["amplification"] = amplification_;
  }

 private:
  /// Written so that a NaN is active.
  static bool is_active(T delta, T epsilon) { return !(std::abs(delta) <= epsilon); }

  T epsilon_;
  int passes_ = 0;
  double r_ = 0.0, alpha_ = 0.0;
  std::vector<T> amplification_;
};

template <class T, bool amplifies>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState*) {
  return std::make_unique<RamMerge<T>>(context, amplifies);
}

}  // namespace

constinit const Method kRam{.name = "ram",
                            .summary = "add what one model changed, average what several changed",
                            .paper = "Yuan et al. 2026, arXiv:2601.13572",
                            .base = Method::Base::kRequired,
                            .parameters = kParameters,
                            .make_float = make<float, false>,
                            .make_double = make<double, false>};

constinit const Method kRamplusTl{.name = "ramplus_tl",
                                  .summary = "ram that amplifies a model's own changes, by tensor",
                                  .paper = "Yuan et al. 2026, arXiv:2601.13572",
                                  .base = Method::Base::kRequired,
                                  .parameters = kPlusParameters,
                                  .make_float = make<float, true>,
                                  .make_double = make<double, true>};

}  // namespace mergex::merging
