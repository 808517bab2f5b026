#include <algorithm>
#include <cmath>

#include "merging/methods.h"

namespace mergex::merging {
namespace {

constexpr Parameter kParameters[] = {{.name = "t",
                                      .scope = Parameter::Scope::kShared,
                                      .kind = Parameter::Kind::kNumber,
                                      .fallback = std::nullopt,
                                      .range = {.at_least = 0.0},
                                      .summary = "farthest that a value moves towards the other model"}};

std::optional<int> copies(const TensorContext& context) {
  return context.shared["t"] == 0.0 ? std::optional(-1) : std::nullopt;
}

template <class T>
class NearswapMerge final : public TensorMerge<T> {
 public:
  explicit NearswapMerge(const TensorContext& context) : t_(static_cast<T>(context.shared["t"])) {}

  void merge(const Tile<T>& tile, const Workspace<T>&, T* out) const override {
    constexpr T kSmallestDistance = T(1e-6);
    for (std::int64_t i = 0; i < tile.count; ++i) {
      const T a = tile.base[i], b = tile.inputs[0][i];
      const T share = std::min(t_ / std::max(std::abs(a - b), kSmallestDistance), T{1});
      out[i] = share * b + (T{1} - share) * a;
    }
  }

 private:
  T t_;
};

template <class T>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState*) {
  return std::make_unique<NearswapMerge<T>>(context);
}

}  // namespace

constinit const Method kNearswap{.name = "nearswap",
                                 .summary = "move each value of the base towards the other model, by at most t",
                                 .paper = "mergekit, after alchemonaut 2024 (QuartetAnemoi)",
                                 .base = Method::Base::kRequired,
                                 .max_inputs = 1,
                                 .parameters = kParameters,
                                 .copies = copies,
                                 .make_float = make<float>,
                                 .make_double = make<double>};

}  // namespace mergex::merging
