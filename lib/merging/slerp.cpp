#include "merging/gram_merge.h"
#include "merging/methods.h"

namespace mergex::merging {
namespace {

constexpr Parameter kParameters[] = {{.name = "t",
                                      .scope = Parameter::Scope::kShared,
                                      .kind = Parameter::Kind::kNumber,
                                      .fallback = std::nullopt,
                                      .summary = "0: the base, 1: the other model; beyond, extrapolation"}};

std::optional<int> copies(const TensorContext& context) {
  const double t = context.shared["t"];
  if (t == 0.0) return -1;
  if (t == 1.0) return 0;
  return std::nullopt;
}

template <class T>
class SlerpMerge final : public GramMerge<T> {
 public:
  explicit SlerpMerge(const TensorContext& context)
      : GramMerge<T>(context, GramMerge<T>::Vectors::kBaseAndInputs, false), t_(context.shared["t"]) {}

 private:
  Combination combination(const Gram& gram) const override {
    constexpr double kSmallestNorm = 1e-8;  // below, a vector stays as it is
    constexpr double kNearlyParallel = 0.9995;
    const auto length = [&](std::size_t i) { return gram.norm(i) > kSmallestNorm ? gram.norm(i) : 1.0; };
    const double cosine = gram(0, 1) / length(0) / length(1);
    if (std::abs(cosine) > kNearlyParallel) return {.coefficients = {1.0 - t_, t_}, .note = "nearly parallel: linear"};
    const double angle = std::acos(cosine);
    return {.coefficients = {std::sin((1.0 - t_) * angle) / std::sin(angle), std::sin(t_ * angle) / std::sin(angle)}};
  }

  double t_;
};

template <class T>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState*) {
  return std::make_unique<SlerpMerge<T>>(context);
}

}  // namespace

constinit const Method kSlerp{.name = "slerp",
                              .summary = "spherical interpolation of two models, tensor by tensor",
                              .paper = "Shoemake 1985, SIGGRAPH",
                              .base = Method::Base::kRequired,
                              .max_inputs = 1,
                              .parameters = kParameters,
                              .copies = copies,
                              .make_float = make<float>,
                              .make_double = make<double>};

}  // namespace mergex::merging
