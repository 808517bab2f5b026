#include "merging/gram_merge.h"
#include "merging/methods.h"

namespace mergex::merging {
namespace {

constexpr Parameter kParameters[] = {{.name = "filter_wise",
                                      .scope = Parameter::Scope::kShared,
                                      .kind = Parameter::Kind::kFlag,
                                      .fallback = 0.0,
                                      .summary = "one ratio per stored row instead of one per tensor"}};

/// Interpolates between the base and the mean of the models by how much the task vectors agree.
template <class T>
class ModelStockMerge final : public GramMerge<T> {
 public:
  explicit ModelStockMerge(const TensorContext& context)
      : GramMerge<T>(context, GramMerge<T>::Vectors::kTaskVectors, context.shared["filter_wise"] != 0.0),
        published_(context.dialect != Dialect::kMergekit) {}

 private:
  Combination combination(const Gram& gram) const override {
    const auto n = static_cast<double>(gram.size());
    double cosine = 0.0;
    for (std::size_t i = 0; i < gram.size(); ++i) {
      for (std::size_t j = i + 1; j < gram.size(); ++j) cosine += pair_cosine(gram, i, j);
    }
    cosine /= n * (n - 1.0) / 2.0;
    const double divisor = 1.0 + (n - 1.0) * cosine;
    double t = n * cosine / divisor;
    Combination result;
    if (published_ && (t < 0.0 || t > 1.0 || divisor <= 0.0)) {
      t = divisor > 0.0 ? std::clamp(t, 0.0, 1.0) : 0.0;
      result.note = "clamped: task vectors disagree";
    } else if (std::abs(divisor) < 1e-12) {
      t = 0.0;
      result.note = "task vectors cancel: base";
    }
    result.interpolation = t;
    result.coefficients.assign(gram.size(), t / n);
    return result;
  }

  double pair_cosine(const Gram& gram, std::size_t i, std::size_t j) const {
    if (published_) return gram.cosine(i, j);
    constexpr double kSmallestProduct = 1e-6;  // absolute in mergekit: the cosine of small tensors comes out smaller
    return std::clamp(gram(i, j) / std::max(gram.norm(i) * gram.norm(j), kSmallestProduct), -1.0, 1.0);
  }

  bool published_;
};

template <class T>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState*) {
  return std::make_unique<ModelStockMerge<T>>(context);
}

}  // namespace

constinit const Method kModelStock{.name = "model_stock",
                                   .summary = "between base and mean, by the angle between task vectors",
                                   .paper = "Jang, Yun and Han 2024, arXiv:2403.19522",
                                   .base = Method::Base::kRequired,
                                   .min_inputs = 2,
                                   .parameters = kParameters,
                                   .make_float = make<float>,
                                   .make_double = make<double>};

}  // namespace mergex::merging
