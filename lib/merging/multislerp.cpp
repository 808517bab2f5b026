#include "merging/gram_merge.h"
#include "merging/methods.h"

namespace mergex::merging {
namespace {

constexpr Parameter kParameters[] = {{.name = "weight",
                                      .scope = Parameter::Scope::kInput,
                                      .kind = Parameter::Kind::kNumber,
                                      .fallback = std::nullopt,
                                      .summary = "share of the model"},
                                     {.name = "normalize_weights",
                                      .scope = Parameter::Scope::kShared,
                                      .kind = Parameter::Kind::kFlag,
                                      .fallback = 1.0,
                                      .summary = "divide the weights by their sum"},
                                     {.name = "eps",
                                      .scope = Parameter::Scope::kShared,
                                      .kind = Parameter::Kind::kNumber,
                                      .fallback = 1e-8,
                                      .range = {.above = 0.0},
                                      .summary = "added to norms; directions whose mean is shorter cancel"}};

std::vector<double> weights_of(const TensorContext& context) {
  std::vector<double> weights;
  double sum = 0.0;
  for (const auto& input : context.inputs) sum += weights.emplace_back(input.parameters["weight"]);
  if (context.shared["normalize_weights"] != 0.0) {
    for (auto& w : weights) w /= sum;
  }
  return weights;
}

std::string problem(const TensorContext& context) {
  double sum = 0.0;
  for (const auto& input : context.inputs) sum += input.parameters["weight"];
  if (context.shared["normalize_weights"] == 0.0 || std::abs(sum) >= 1e-8) return "";
  return "the weights sum to 0 and cannot be normalized; change a weight or set normalize_weights to false";
}

std::optional<int> copies(const TensorContext& context) {
  const auto weights = weights_of(context);
  std::optional<int> only;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0.0) continue;
    if (only || weights[i] != 1.0) return std::nullopt;
    only = static_cast<int>(i);
  }
  return only;
}

/// The weighted mean direction with the weighted mean norm. (The published step in the tangent space of that direction
/// is zero: the mean of the tangents is the mean direction's own, of which nothing is left.)
template <class T>
class MultislerpMerge final : public GramMerge<T> {
 public:
  explicit MultislerpMerge(const TensorContext& context)
      : GramMerge<T>(context, context.has_base ? GramMerge<T>::Vectors::kTaskVectors : GramMerge<T>::Vectors::kInputs,
                     false),
        weights_(weights_of(context)),
        epsilon_(context.shared["eps"]) {}

 private:
  Combination combination(const Gram& gram) const override {
    std::vector<double> direction;
    double norm = 0.0;
    for (std::size_t i = 0; i < gram.size(); ++i) {
      direction.push_back(weights_[i] / (gram.norm(i) + epsilon_));
      norm += weights_[i] * gram.norm(i);
    }
    double squared = 0.0;
    for (std::size_t i = 0; i < gram.size(); ++i) {
      for (std::size_t j = 0; j < gram.size(); ++j) squared += direction[i] * direction[j] * gram(i, j);
    }
    const double length = std::sqrt(std::max(squared, 0.0));
    if (length < epsilon_) return {.coefficients = weights_, .note = "directions cancel: weighted sum"};
    for (auto& c : direction) c *= norm / length;
    return {.coefficients = direction};
  }

  std::vector<double> weights_;
  double epsilon_;
};

template <class T>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState*) {
  return std::make_unique<MultislerpMerge<T>>(context);
}

}  // namespace

constinit const Method kMultislerp{.name = "multislerp",
                                   .summary = "mean direction with the mean norm, of models or of task vectors",
                                   .paper = "mergekit, after Buss and Fillmore 2001",
                                   .base = Method::Base::kOptional,
                                   .min_inputs = 2,
                                   .parameters = kParameters,
                                   .problem = problem,
                                   .copies = copies,
                                   .make_float = make<float>,
                                   .make_double = make<double>};

}  // namespace mergex::merging
