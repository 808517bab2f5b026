#pragma once

#include <array>
#include <memory>
#include <vector>

#include "merging/method.h"

namespace mergex::merging {

/// A run of one input's task vector. Runs of a unit come in order; with whole rows, a run holds whole rows.
template <class T>
struct Run {
  std::size_t input = 0;
  std::int64_t begin = 0, count = 0, unit = 0;
  std::span<double> sums = {};  ///< the sparsifier's, as in Workspace
  std::span<std::uint32_t> counts = {};
  std::span<std::int64_t> state = {};
  std::span<std::vector<std::uint64_t>> lists = {};
};

/// What of a task vector is kept: the step in which the task-vector methods differ.
template <class T>
class Sparsifier {
 public:
  virtual ~Sparsifier() = default;
  /// As TensorMerge's; scratch is the pipeline's.
  virtual typename TensorMerge<T>::Needs needs() const { return {}; }
  virtual bool wants(int pass) const { return pass < needs().passes; }
  virtual void gather(int /*pass*/, const Run<T>&, const T* /*delta*/) const {}
  virtual void finish(int /*pass*/, const Totals&) {}
  /// Sets what is dropped to 0.
  virtual void keep(const Run<T>&, T* delta) const = 0;
  virtual void report(io::Json& /*entry*/) const {}
};

/// What survivors are multiplied by.
enum class Rescale {
  kNone,
  kL1,  ///< sum of magnitudes before / after, per tensor
  kInverseDensity,
  kInverseProbability,  ///< of the element, by the sparsifier
};

/// How the sign of an element is elected, and what becomes of those that agree (Yadav et al. 2023, and its dialects).
enum class Vote {
  kNone,        ///< all are added
  kWeighted,    ///< weights act before the vote; divided by the weights that agree
  kUnweighted,  ///< weights act after the vote; divided by the number that agree
};

struct TaskVectorOptions {
  Vote vote = Vote::kNone;
  Rescale rescale = Rescale::kNone;
  bool normalize = false;
};

/// Signs of the votes of a whole model, where it decides on elements whose votes cancel.
class MajoritySign {
 public:
  virtual ~MajoritySign() = default;
  virtual void add(std::int64_t positive_minus_negative) = 0;
  virtual bool is_negative() const = 0;
};

/// base + lambda * (sum of weight * rescale * kept (input - base), by the vote, / divisor): the order of operations and
/// of roundings is mergekit's. Passes: the sparsifier's, then one for L1 rescaling, then one for the majority's sign.
/// @param sparsifier  null: everything is kept
/// @param majority    null: a sum of 0 elects +
template <class T>
std::unique_ptr<TensorMerge<T>> merge_task_vectors(const TensorContext& context, const TaskVectorOptions& options,
                                                   std::unique_ptr<Sparsifier<T>> sparsifier,
                                                   MajoritySign* majority = nullptr);

/// The base, where lambda or all weights are 0.
std::optional<int> copies_base(const TensorContext& context);

/// Random words of one input's tensor: the same wherever, whenever and in whatever pieces they are drawn.
std::uint64_t mask_key(const TensorContext& context, std::string_view method, std::size_t input);

// Parameters that several of these methods have.
inline constexpr io::Range kFraction{.at_least = 0.0, .at_most = 1.0};
inline constexpr Parameter kWeight{.name = "weight",
                                   .scope = Parameter::Scope::kInput,
                                   .kind = Parameter::Kind::kNumber,
                                   .fallback = std::nullopt,
                                   .summary = "factor of the model's task vector"};
inline constexpr Parameter kDensity{.name = "density",
                                    .scope = Parameter::Scope::kInput,
                                    .kind = Parameter::Kind::kNumber,
                                    .fallback = 1.0,
                                    .range = kFraction,
                                    .summary = "fraction of the task vector that is kept"};
inline constexpr Parameter kLambda{.name = "lambda",
                                   .scope = Parameter::Scope::kShared,
                                   .kind = Parameter::Kind::kNumber,
                                   .fallback = 1.0,
                                   .summary = "factor of the merged task vector"};
inline constexpr Parameter kInt8Mask{.name = "int8_mask",
                                     .scope = Parameter::Scope::kShared,
                                     .kind = Parameter::Kind::kFlag,
                                     .fallback = 0.0,
                                     .summary = "accepted for mergekit's recipes; has no effect here"};
constexpr Parameter normalize_parameter(bool fallback) {
  return {.name = "normalize",
          .scope = Parameter::Scope::kShared,
          .kind = Parameter::Kind::kFlag,
          .fallback = fallback ? 1.0 : 0.0,
          .summary = "divide by the weights (with a vote: by those that agree)"};
}

/// mergekit's flag and what it can mean. "true" is the dialect's: L1 in mergekit's, elsewhere the published inverse.
inline constexpr std::array<std::string_view, 6> kRescaleNames{"false",           "true",        "none", "l1",
                                                               "inverse_density", "inverse_prob"};
constexpr Parameter rescale_parameter(bool fallback) {
  return {.name = "rescale",
          .scope = Parameter::Scope::kShared,
          .kind = Parameter::Kind::kChoice,
          .fallback = fallback ? 1.0 : 0.0,
          .choices = kRescaleNames,
          .summary =
              "multiply what is kept: true (mergekit: l1; elsewhere the published inverse), l1, inverse_density, "
              "inverse_prob or none"};
}
/// @param published  what "true" means outside of mergekit's dialect
Rescale rescale_of(const TensorContext& context, Rescale published);

}  // namespace mergex::merging
