#include <algorithm>
#include <array>
#include <cmath>

#include "merging/methods.h"
#include "merging/random_mask.h"
#include "merging/span_kernels.h"
#include "merging/task_vectors.h"

namespace mergex::merging {
namespace {

constexpr Parameter kParameters[] = {kWeight,  kDensity, kLambda, normalize_parameter(false), rescale_parameter(true),
                                     kInt8Mask};

/// Keeps each entry with the probability `density`.
template <class T>
class BernoulliSparsifier final : public Sparsifier<T> {
 public:
  BernoulliSparsifier(const TensorContext& context, std::string_view method) {
    for (std::size_t i = 0; i < context.inputs.size(); ++i) {
      inputs_.push_back({.key = mask_key(context, method, i), .density = context.inputs[i].parameters["density"]});
    }
  }

  void keep(const Run<T>& run, T* delta) const override {
    const auto& input = inputs_[run.input];
    if (input.density >= 1.0) return;
    const auto threshold = chance(input.density);
    RandomWords words(input.key);
    for (std::int64_t i = 0; i < run.count; i += kBlock) {
      const auto n = std::min(kBlock, run.count - i);
      span_kernels<T>().keep_drawn(n, words.draw(run.begin + i, n), threshold, delta + i);
    }
  }

 private:
  struct Input {
    std::uint64_t key;
    double density;
  };
  std::vector<Input> inputs_;
};

template <class T, Vote vote>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState*) {
  const auto rescale = rescale_of(context, Rescale::kInverseDensity);
  return merge_task_vectors<T>(
      context,
      {.vote = vote == Vote::kNone || context.dialect != Dialect::kPeft ? vote : Vote::kUnweighted,
       .rescale = rescale,
       .normalize = context.shared["normalize"] != 0.0},
      std::make_unique<BernoulliSparsifier<T>>(context, "dare"));
}

}  // namespace

constinit const Method kDareLinear{.name = "dare_linear",
                                   .summary = "drop entries of task vectors at random, rescale the rest, add",
                                   .paper = "Yu et al. 2023, arXiv:2311.03099",
                                   .base = Method::Base::kRequired,
                                   .parameters = kParameters,
                                   .is_random = true,
                                   .copies = copies_base,
                                   .make_float = make<float, Vote::kNone>,
                                   .make_double = make<double, Vote::kNone>};

constinit const Method kDareTies{.name = "dare_ties",
                                 .summary = "dare_linear with the sign election of TIES",
                                 .paper = "Yu et al. 2023, arXiv:2311.03099",
                                 .base = Method::Base::kRequired,
                                 .parameters = kParameters,
                                 .is_random = true,
                                 .copies = copies_base,
                                 .make_float = make<float, Vote::kWeighted>,
                                 .make_double = make<double, Vote::kWeighted>};

}  // namespace mergex::merging
