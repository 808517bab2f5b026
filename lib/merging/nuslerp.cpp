#include "merging/gram_merge.h"
#include "merging/methods.h"

namespace mergex::merging {
namespace {

constexpr Parameter kParameters[] = {
    {.name = "weight",
     .scope = Parameter::Scope::kInput,
     .kind = Parameter::Kind::kNumber,
     .fallback = std::nullopt,
     .summary = "share of the model; only their ratio counts"},
    {.name = "nuslerp_flatten",
     .scope = Parameter::Scope::kShared,
     .kind = Parameter::Kind::kFlag,
     .fallback = 1.0,
     .summary = "one angle per tensor; false: one per vector"},
    {.name = "nuslerp_row_wise",
     .scope = Parameter::Scope::kShared,
     .kind = Parameter::Kind::kFlag,
     .fallback = 0.0,
     .summary = "with nuslerp_flatten false: vectors along the first dimension; false: along the last (stored rows)"}};

/// Share of the second model.
double share(const TensorContext& context) {
  const double first = context.inputs[0].parameters["weight"], second = context.inputs[1].parameters["weight"];
  return std::abs(first + second) < 1e-6 ? 0.5 : second / (first + second);
}

std::optional<int> copies(const TensorContext& context) {
  if (share(context) == 0.0) return 0;
  if (share(context) == 1.0) return 1;
  return std::nullopt;
}

struct Pair {
  double first, second;
};

/// Coefficients of two vectors with these inner products.
Pair interpolate(double t, double first_squared, double product, double second_squared) {
  constexpr double kSmallestNorm = 1e-7;
  const double norms =
      std::max(std::sqrt(first_squared), kSmallestNorm) * std::max(std::sqrt(second_squared), kSmallestNorm);
  const double angle = std::acos(std::clamp(product / norms, -1.0, 1.0));
  const double sine = std::sin(angle);
  if (std::abs(sine) < 1e-8) return {1.0 - t, t};
  return {std::sin((1.0 - t) * angle) / sine, std::sin(t * angle) / sine};
}

template <class T>
class NuslerpMerge final : public GramMerge<T> {
 public:
  NuslerpMerge(const TensorContext& context, bool per_row)
      : GramMerge<T>(context, context.has_base ? GramMerge<T>::Vectors::kTaskVectors : GramMerge<T>::Vectors::kInputs,
                     per_row),
        t_(share(context)) {}

 private:
  Combination combination(const Gram& gram) const override {
    const auto [first, second] = interpolate(t_, gram(0, 0), gram(0, 1), gram(1, 1));
    return {.coefficients = {first, second}};
  }

  double t_;
};

/// Vectors along the first dimension: a column's sums are spread over all rows.
template <class T>
class ColumnNuslerpMerge final : public TensorMerge<T> {
 public:
  explicit ColumnNuslerpMerge(const TensorContext& context)
      : t_(share(context)),
        columns_(context.shape.empty() || context.shape[0] == 0 ? 1 : context.num_elements() / context.shape[0]) {}

  typename TensorMerge<T>::Needs needs() const override {
    return {.passes = 1, .sums = 3 * static_cast<std::size_t>(columns_)};
  }

  void gather(int, const Tile<T>& tile, const Workspace<T>& workspace) const override {
    for (std::int64_t i = 0, column = tile.begin % columns_; i < tile.count; ++i) {
      const double origin = tile.base == nullptr ? 0.0 : static_cast<double>(tile.base[i]);
      const double a = static_cast<double>(tile.inputs[0][i]) - origin,
                   b = static_cast<double>(tile.inputs[1][i]) - origin;
      double* sums = workspace.sums.data() + 3 * column;
      sums[0] += a * a;
      sums[1] += a * b;
      sums[2] += b * b;
      if (++column == columns_) column = 0;
    }
  }

  void finish(int, const Totals& totals) override {
    for (std::int64_t c = 0; c < columns_; ++c) {
      const double* sums = totals.sums.data() + 3 * c;
      coefficients_.push_back(interpolate(t_, sums[0], sums[1], sums[2]));
    }
  }

  void merge(const Tile<T>& tile, const Workspace<T>&, T* out) const override {
    for (std::int64_t i = 0, column = tile.begin % columns_; i < tile.count; ++i) {
      const double origin = tile.base == nullptr ? 0.0 : static_cast<double>(tile.base[i]);
      const double a = static_cast<double>(tile.inputs[0][i]) - origin,
                   b = static_cast<double>(tile.inputs[1][i]) - origin;
      const auto& c = coefficients_[static_cast<std::size_t>(column)];
      out[i] = static_cast<T>(origin + (c.first * a + c.second * b));
      if (++column == columns_) column = 0;
    }
  }

 private:
  double t_;
  std::int64_t columns_;
  std::vector<Pair> coefficients_;
};

template <class T>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState*) {
  const bool flat = context.shared["nuslerp_flatten"] != 0.0, columns = context.shared["nuslerp_row_wise"] != 0.0;
  if (!flat && columns) return std::make_unique<ColumnNuslerpMerge<T>>(context);
  return std::make_unique<NuslerpMerge<T>>(context, !flat);
}

}  // namespace

constinit const Method kNuslerp{
    .name = "nuslerp",
    .summary = "spherical interpolation by weights: of models, or of task vectors with a base",
    .paper = "Shoemake 1985, SIGGRAPH; as in mergekit",
    .base = Method::Base::kOptional,
    .min_inputs = 2,
    .max_inputs = 2,
    .parameters = kParameters,
    .copies = copies,
    .make_float = make<float>,
    .make_double = make<double>};

}  // namespace mergex::merging
