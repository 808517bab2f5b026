#include <Eigen/Cholesky>
#include <Eigen/Core>
#include <algorithm>
#include <mutex>

#include <fmt/format.h>

#include "merging/methods.h"

namespace mergex::merging {
namespace {

constexpr Parameter kParameters[] = {{.name = "reduce_non_diagonal_ratio",
                                      .scope = Parameter::Scope::kShared,
                                      .kind = Parameter::Kind::kNumber,
                                      .fallback = 0.9,
                                      .range = {.at_least = 0.0, .at_most = 1.0},
                                      .summary = "factor of the Gram matrices off their diagonal"},
                                     {.name = "ridge",
                                      .scope = Parameter::Scope::kShared,
                                      .kind = Parameter::Kind::kNumber,
                                      .fallback = 1e-6,
                                      .range = {.at_least = 0.0},
                                      .summary = "added to each diagonal, as a fraction of its mean"}};

bool has_gram(const TensorContext& context) {
  return context.shape.size() == 2 && context.inputs[0].statistics != nullptr;
}

std::string problem(const TensorContext& context) {
  if (context.shape.size() != 2) return "";
  std::size_t with_gram = 0;
  for (const auto& input : context.inputs) {
    if (input.statistics == nullptr) continue;
    ++with_gram;
    const auto* stored = input.statistics->stored();
    const std::vector<std::int64_t> expected(2, context.row_length());
    if (stored != nullptr && stored->shape != expected) {
      return fmt::format("the Gram matrix is {}, expected {} for inputs of the [out, in] tensor",
                         io::shape_text(stored->shape), io::shape_text(expected));
    }
  }
  if (with_gram != 0 && with_gram != context.inputs.size()) {
    return fmt::format("{} of {} models have a Gram matrix for this tensor; give it for all or for none", with_gram,
                       context.inputs.size());
  }
  return "";
}

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// The weights W [out, in] whose outputs are closest to those of every model on its own inputs:
/// W = (sum of W_i G_i) (sum of G_i)^-1, row by row. Holds a matrix [in, in] in float64 per model while the tensor is
/// merged.
template <class T>
class RegmeanMerge final : public TensorMerge<T> {
 public:
  explicit RegmeanMerge(const TensorContext& context)
      : size_(context.row_length()),
        off_diagonal_(context.shared["reduce_non_diagonal_ratio"]),
        ridge_(context.shared["ridge"]) {
    for (const auto& input : context.inputs) statistics_.push_back(input.statistics);
  }

  typename TensorMerge<T>::Needs needs() const override { return {.whole_rows = true}; }

  void merge(const Tile<T>& tile, const Workspace<T>&, T* out) const override {
    using Rows = Eigen::Map<const Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>;
    std::call_once(solved_, [&] { solve(); });
    Matrix sum = Matrix::Zero(tile.count / size_, size_);
    for (std::size_t i = 0; i < shares_.size(); ++i) {
      sum.noalias() += Rows(tile.inputs[i], tile.count / size_, size_).template cast<double>() * shares_[i];
    }
    Eigen::Map<Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>(out, tile.count / size_, size_) =
        sum.template cast<T>();
  }

 private:
  /// G_i (sum of G_i)^-1, by Cholesky. The ridge is part of each G_i, so that equal weights stay as they are.
  void solve() const {
    std::vector<Matrix> grams;
    Matrix sum = Matrix::Zero(size_, size_);
    for (const auto* statistics : statistics_) {
      auto& gram = grams.emplace_back(size_, size_);
      statistics->read(0, size_ * size_, gram.data());
      const Eigen::VectorXd diagonal = gram.diagonal();
      gram *= off_diagonal_;
      gram.diagonal() = diagonal.array() + ridge_ * diagonal.mean();
      sum += gram;
    }
    const Eigen::LLT<Matrix> factor(sum);
    // Not positive definite (all zero, or not a Gram matrix): every model counts the same.
    for (auto& gram : grams) {
      if (factor.info() == Eigen::Success) {
        shares_.push_back(factor.solve(gram.transpose()).transpose());
      } else {
        shares_.push_back(Matrix::Identity(size_, size_) / static_cast<double>(grams.size()));
      }
    }
  }

  std::int64_t size_;
  double off_diagonal_, ridge_;
  std::vector<const Source*> statistics_;
  mutable std::once_flag solved_;
  mutable std::vector<Matrix> shares_;  // [models], once solved
};

template <class T>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState* state) {
  if (has_gram(context)) return std::make_unique<RegmeanMerge<T>>(context);
  if constexpr (sizeof(T) == sizeof(float)) {
    return kUniformSoup.make_float(context, state);
  } else {
    return kUniformSoup.make_double(context, state);
  }
}

}  // namespace

constinit const Method kRegmean{.name = "regmean",
                                .summary = "least squares on the models' inputs, from Gram matrices given as files",
                                .paper = "Jin et al. 2022, arXiv:2212.09849",
                                .parameters = kParameters,
                                .statistics = Method::Statistics::kGram,
                                .problem = problem,
                                .make_float = make<float>,
                                .make_double = make<double>};

}  // namespace mergex::merging
