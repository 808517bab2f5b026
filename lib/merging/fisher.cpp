#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "merging/methods.h"
#include "merging/span_kernels.h"

namespace mergex::merging {
namespace {

constexpr Parameter kParameters[] = {
    {.name = "weight",
     .scope = Parameter::Scope::kInput,
     .kind = Parameter::Kind::kNumber,
     .fallback = 1.0,
     .range = {.at_least = 0.0},
     .summary = "factor of the model's Fisher information"},
    {.name = "minimal_fisher_weight",
     .scope = Parameter::Scope::kShared,
     .kind = Parameter::Kind::kNumber,
     .fallback = 1e-6,
     .range = {.above = 0.0},
     .summary = "added to every entry of the Fisher information"},
    {.name = "normalize_fisher_weight",
     .scope = Parameter::Scope::kShared,
     .kind = Parameter::Kind::kFlag,
     .fallback = 1.0,
     .summary = "divide each model's Fisher information by its norm over the whole model"}};

std::string problem(const TensorContext& context) {
  double sum = 0.0;
  std::size_t with_statistics = 0;
  for (const auto& input : context.inputs) {
    sum += input.parameters["weight"];
    if (input.statistics != nullptr) ++with_statistics;
  }
  if (sum <= 0.0) return "all weights are 0; give one model a positive weight";
  if (with_statistics != 0 && with_statistics != context.inputs.size()) {
    return fmt::format("{} of {} models have Fisher information for this tensor; give it for all or for none",
                       with_statistics, context.inputs.size());
  }
  return "";
}

/// Norms of the models' Fisher information over all tensors.
class FisherNorms final : public ModelState {
 public:
  explicit FisherNorms(std::size_t num_inputs) : num_inputs_(num_inputs) {}

  std::size_t join() {
    squares_.emplace_back(num_inputs_);
    return squares_.size() - 1;
  }
  void set(std::size_t tensor, std::vector<double> squares) { squares_[tensor] = std::move(squares); }
  /// In the order of tensors, whichever was done first.
  double norm(std::size_t input) const {
    double sum = 0.0;
    for (const auto& tensor : squares_) sum += tensor[input];
    return std::sqrt(sum);
  }

 private:
  std::size_t num_inputs_;
  std::vector<std::vector<double>> squares_;  // [tensors, inputs]
};

std::shared_ptr<ModelState> model_state(const TensorContext& context) {
  if (context.shared["normalize_fisher_weight"] == 0.0) return nullptr;
  return std::make_shared<FisherNorms>(context.inputs.size());
}

/// Average of each element, weighted by its Fisher information; plainly weighted where there is none.
template <class T>
class FisherMerge final : public TensorMerge<T> {
 public:
  FisherMerge(const TensorContext& context, FisherNorms* norms)
      : floor_(context.shared["minimal_fisher_weight"]), norms_(norms), tensor_(norms == nullptr ? 0 : norms->join()) {
    for (const auto& input : context.inputs) {
      weights_.push_back(input.parameters["weight"]);
      statistics_.push_back(input.statistics);
    }
  }

  typename TensorMerge<T>::Needs needs() const override { return {.passes = 1, .sums = statistics_.size() * kLanes}; }
  bool wants(int) const override { return norms_ != nullptr && statistics_[0] != nullptr; }

  void gather(int, const Tile<T>& tile, const Workspace<T>& workspace) const override {
    std::array<T, kBlock> fisher;
    for (std::int64_t begin = 0; begin < tile.count; begin += kBlock) {
      const auto count = std::min(kBlock, tile.count - begin);
      for (std::size_t i = 0; i < statistics_.size(); ++i) {
        statistics_[i]->read(tile.begin + begin, count, fisher.data());
        span_kernels<T>().dot(count, (tile.begin + begin) % kLanes, fisher.data(), fisher.data(), nullptr,
                              workspace.sums.data() + i * kLanes);
      }
    }
  }

  void finish(int, const Totals& totals) override {
    std::vector<double> squares;
    for (std::size_t i = 0; i < statistics_.size(); ++i) {
      const double* lanes = totals.sums.data() + i * kLanes;
      squares.push_back(std::accumulate(lanes, lanes + kLanes, 0.0));
    }
    norms_->set(tensor_, std::move(squares));
  }

  void merge(const Tile<T>& tile, const Workspace<T>&, T* out) const override {
    const auto factors = factors_now();
    std::array<T, kBlock> fisher;
    std::array<double, kBlock> sum, weight_sum;
    for (std::int64_t begin = 0; begin < tile.count; begin += kBlock) {
      const auto count = std::min(kBlock, tile.count - begin);
      const auto length = static_cast<std::size_t>(count);
      sum.fill(0.0);
      weight_sum.fill(0.0);
      for (std::size_t i = 0; i < statistics_.size(); ++i) {
        if (statistics_[i] != nullptr) {
          statistics_[i]->read(tile.begin + begin, count, fisher.data());
        }
        const T* x = tile.inputs[i] + begin;
        for (std::size_t e = 0; e < length; ++e) {
          const double information = statistics_[i] == nullptr ? 1.0 : static_cast<double>(fisher[e]) + floor_;
          sum[e] += factors[i] * information * static_cast<double>(x[e]);
          weight_sum[e] += factors[i] * information;
        }
      }
      for (std::size_t e = 0; e < length; ++e)
        out[begin + static_cast<std::int64_t>(e)] = static_cast<T>(sum[e] / weight_sum[e]);
    }
  }

  void report(io::Json& entry) const override { entry["coefficients"] = factors_now(); }

 private:
  /// Weights, each divided by the model's norm where norms are asked for; they add up to what the weights add up to.
  std::vector<double> factors_now() const {
    auto factors = weights_;
    if (norms_ == nullptr || statistics_[0] == nullptr) return factors;
    double total = 0.0;
    std::vector<double> inverse;
    for (std::size_t i = 0; i < factors.size(); ++i) total += inverse.emplace_back(1.0 / (norms_->norm(i) + 1e-6));
    for (std::size_t i = 0; i < factors.size(); ++i) factors[i] *= inverse[i] / total;
    return factors;
  }

  double floor_;
  FisherNorms* norms_;
  std::size_t tensor_;
  std::vector<double> weights_;
  std::vector<const Source*> statistics_;
};

template <class T>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState* state) {
  return std::make_unique<FisherMerge<T>>(context, static_cast<FisherNorms*>(state));
}

}  // namespace

constinit const Method kFisher{.name = "fisher",
                               .summary = "average each element by its Fisher information, given as files",
                               .paper = "Matena and Raffel 2022, arXiv:2111.09832",
                               .parameters = kParameters,
                               .statistics = Method::Statistics::kFisher,
                               .problem = problem,
                               .model_state = model_state,
                               .make_float = make<float>,
                               .make_double = make<double>};

}  // namespace mergex::merging
