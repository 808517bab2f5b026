#include <fmt/format.h>

#include "merging/gram_merge.h"
#include "merging/methods.h"

namespace mergex::merging {
namespace {

constexpr Parameter kParameters[] = {{.name = "max_iter",
                                      .scope = Parameter::Scope::kShared,
                                      .kind = Parameter::Kind::kNumber,
                                      .fallback = 10.0,
                                      .range = {.at_least = 0.0},
                                      .summary = "most steps towards the mean"},
                                     {.name = "tol",
                                      .scope = Parameter::Scope::kShared,
                                      .kind = Parameter::Kind::kNumber,
                                      .fallback = 1e-5,
                                      .range = {.above = 0.0},
                                      .summary = "length of the last step; shorter tensors do not count"}};

/// The mean on the sphere, found by steps in the tangent space. All vectors lie in the span of the inputs, so the steps
/// are taken on coordinates and need nothing but inner products.
template <class T>
class KarcherMerge final : public GramMerge<T> {
 public:
  explicit KarcherMerge(const TensorContext& context)
      : GramMerge<T>(context, GramMerge<T>::Vectors::kInputs, false),
        max_steps_(static_cast<int>(context.shared["max_iter"])),
        tolerance_(context.shared["tol"]) {}

 private:
  Combination combination(const Gram& gram) const override {
    const auto n = gram.size();
    double mean_norm = 0.0;
    std::vector<std::size_t> used;
    for (std::size_t i = 0; i < n; ++i) {
      mean_norm += gram.norm(i) / static_cast<double>(n);
      if (!(gram.norm(i) <= tolerance_)) used.push_back(i);
    }
    const auto k = used.size();
    Combination result{.coefficients = std::vector<double>(n)};
    if (k < n) result.note = fmt::format("{} of {} inputs are zero within tol", n - k, n);
    if (k == 0) return result;

    Gram cosines(k);
    for (std::size_t i = 0; i < k; ++i) {
      for (std::size_t j = i; j < k; ++j) cosines.set(i, j, i == j ? 1.0 : gram.cosine(used[i], used[j]));
    }
    const auto dot = [&](std::size_t i, const std::vector<double>& v) {
      double sum = 0.0;
      for (std::size_t j = 0; j < k; ++j) sum += v[j] * cosines(i, j);
      return sum;
    };
    const auto length = [&](const std::vector<double>& v) {
      double sum = 0.0;
      for (std::size_t i = 0; i < k; ++i) sum += v[i] * dot(i, v);
      return std::sqrt(std::max(sum, 0.0));
    };
    const auto scale = [](std::vector<double>& v, double factor) {
      for (auto& x : v) x *= factor;
    };

    const double share = 1.0 / static_cast<double>(k);
    std::vector<double> mean(k, share);  // coordinates in the unit vectors of the inputs
    if (const double start = length(mean); start < tolerance_) {
      mean.assign(k, 0.0);
      mean[0] = 1.0;
      result.note = "directions cancel: started from the first input";
    } else {
      scale(mean, 1.0 / start);
    }
    for (int step = 0; step < max_steps_; ++step) {
      std::vector<double> tangent(k, 0.0);
      for (std::size_t i = 0; i < k; ++i) {
        const double cosine = std::clamp(dot(i, mean), -1.0, 1.0);
        const double angle = std::acos(cosine);
        if (angle < tolerance_) continue;
        if (std::sin(angle) < 1e-12) {  // opposite to the mean: no direction is the shorter way
          result.note = "an input is opposite to the mean and was left out of a step";
          continue;
        }
        const double stretch = share * angle / std::sin(angle);
        tangent[i] += stretch;
        for (std::size_t j = 0; j < k; ++j) tangent[j] -= stretch * cosine * mean[j];
      }
      const double distance = length(tangent);
      if (distance < tolerance_) break;
      for (std::size_t i = 0; i < k; ++i) {
        mean[i] = std::cos(distance) * mean[i] + std::sin(distance) / distance * tangent[i];
      }
      scale(mean, 1.0 / length(mean));
    }
    for (std::size_t i = 0; i < k; ++i) result.coefficients[used[i]] = mean_norm * mean[i] / gram.norm(used[i]);
    return result;
  }

  int max_steps_;
  double tolerance_;
};

template <class T>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState*) {
  return std::make_unique<KarcherMerge<T>>(context);
}

}  // namespace

constinit const Method kKarcher{.name = "karcher",
                                .summary = "Riemannian mean of directions with the mean norm",
                                .paper = "Karcher 1977, Comm. Pure Appl. Math. 30",
                                .parameters = kParameters,
                                .make_float = make<float>,
                                .make_double = make<double>};

}  // namespace mergex::merging
