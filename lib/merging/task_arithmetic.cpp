#include "merging/methods.h"
#include "merging/task_vectors.h"

namespace mergex::merging {
namespace {

constexpr Parameter kParameters[] = {kWeight, kLambda, normalize_parameter(false), kInt8Mask};

template <class T>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState*) {
  return merge_task_vectors<T>(context, {.normalize = context.shared["normalize"] != 0.0}, nullptr);
}

}  // namespace

constinit const Method kTaskArithmetic{.name = "task_arithmetic",
                                       .summary = "base + weighted sum of task vectors; a negative weight forgets",
                                       .paper = "Ilharco et al. 2022, arXiv:2212.04089",
                                       .base = Method::Base::kRequired,
                                       .parameters = kParameters,
                                       .copies = copies_base,
                                       .make_float = make<float>,
                                       .make_double = make<double>};

}  // namespace mergex::merging
