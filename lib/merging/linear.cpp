#include <algorithm>
#include <cmath>

#include "merging/methods.h"
#include "merging/span_kernels.h"

namespace mergex::merging {
namespace {

constexpr Parameter kParameters[] = {{.name = "weight",
                                      .scope = Parameter::Scope::kInput,
                                      .kind = Parameter::Kind::kNumber,
                                      .fallback = std::nullopt,
                                      .summary = "factor of the model"},
                                     {.name = "normalize",
                                      .scope = Parameter::Scope::kShared,
                                      .kind = Parameter::Kind::kFlag,
                                      .fallback = 1.0,
                                      .summary = "divide by the sum of the weights"}};

double sum_of_weights(const TensorContext& context) {
  double sum = 0.0;
  for (const auto& input : context.inputs) sum += input.parameters["weight"];
  return sum;
}

std::string problem(const TensorContext& context) {
  if (context.shared["normalize"] == 0.0 || std::abs(sum_of_weights(context)) >= 1e-8) return "";
  return "the weights sum to 0 and cannot be normalized; change a weight or set normalize to false";
}

std::optional<int> copies(const TensorContext& context) {
  std::optional<int> only;
  for (std::size_t i = 0; i < context.inputs.size(); ++i) {
    const double weight = context.inputs[i].parameters["weight"];
    if (weight == 0.0) continue;
    if (only || (context.shared["normalize"] == 0.0 && weight != 1.0)) return std::nullopt;
    only = static_cast<int>(i);
  }
  return only;
}

/// Weights in T, products fused with the sum, one division: what mergekit's vectorised builds compute.
template <class T>
class LinearMerge final : public TensorMerge<T> {
 public:
  LinearMerge(std::vector<T> weights, bool normalize) : weights_(std::move(weights)) {
    T sum{0};
    for (const T w : weights_) sum += w;
    if (normalize) divisor_ = sum;
  }

  void merge(const Tile<T>& tile, const Workspace<T>&, T* out) const override {
    const auto& k = span_kernels<T>();
    for (std::int64_t begin = 0; begin < tile.count; begin += kBlock) {
      const auto count = std::min(kBlock, tile.count - begin);
      std::fill_n(out + begin, count, T{0});
      for (std::size_t i = 0; i < weights_.size(); ++i) {
        if (weights_[i] != T{0}) k.multiply_add(count, tile.inputs[i] + begin, weights_[i], out + begin);
      }
      if (divisor_ != T{1}) k.divide(count, divisor_, out + begin);
    }
  }

 private:
  std::vector<T> weights_;
  T divisor_{1};
};

template <class T>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState*) {
  std::vector<T> weights;
  for (const auto& input : context.inputs) weights.push_back(static_cast<T>(input.parameters["weight"]));
  return std::make_unique<LinearMerge<T>>(std::move(weights), context.shared["normalize"] != 0.0);
}

std::optional<int> copies_only_input(const TensorContext& context) {
  return context.inputs.size() == 1 ? std::optional(0) : std::nullopt;
}

/// In double and rounded once, so that the average of equal models is that model.
template <class T>
class UniformSoup final : public TensorMerge<T> {
 public:
  explicit UniformSoup(std::size_t num_inputs) : coefficients_(num_inputs, 1.0 / static_cast<double>(num_inputs)) {}

  void merge(const Tile<T>& tile, const Workspace<T>&, T* out) const override {
    span_kernels<T>().combine(tile.count, static_cast<std::int64_t>(coefficients_.size()), tile.inputs.data(),
                              coefficients_.data(), nullptr, out);
  }

 private:
  std::vector<double> coefficients_;
};

template <class T>
std::unique_ptr<TensorMerge<T>> make_soup(const TensorContext& context, ModelState*) {
  return std::make_unique<UniformSoup<T>>(context.inputs.size());
}

}  // namespace

constinit const Method kLinear{.name = "linear",
                               .summary = "weighted average",
                               .paper = "Wortsman et al. 2022, arXiv:2203.05482",
                               .parameters = kParameters,
                               .problem = problem,
                               .copies = copies,
                               .make_float = make<float>,
                               .make_double = make<double>};

constinit const Method kUniformSoup{.name = "uniform_soup",
                                    .summary = "plain average of all models",
                                    .paper = "Wortsman et al. 2022, arXiv:2203.05482",
                                    .copies = copies_only_input,
                                    .make_float = make_soup<float>,
                                    .make_double = make_soup<double>};

}  // namespace mergex::merging
