#include <algorithm>

#include "merging/magnitude.h"
#include "merging/methods.h"

namespace mergex::merging {
namespace {

constexpr Parameter kParameters[] = {kWeight,
                                     kDensity,
                                     {.name = "gamma",
                                      .scope = Parameter::Scope::kInput,
                                      .kind = Parameter::Kind::kNumber,
                                      .fallback = 0.01,
                                      .range = kFraction,
                                      .summary = "fraction of the largest entries that is dropped"},
                                     kLambda,
                                     normalize_parameter(false),
                                     rescale_parameter(false),
                                     kInt8Mask};

std::string problem(const TensorContext& context) {
  const auto rescale = rescale_of(context, Rescale::kL1);
  if (rescale == Rescale::kNone || rescale == Rescale::kL1) return "";
  return "breadcrumbs can only rescale by l1; its masks are not random";
}

/// trunc(density n) entries, below the trunc(gamma n) largest as far as there are enough.
RankBandSize band(const TensorContext::Input& input, std::int64_t n) {
  const double density = input.parameters["density"];
  if (density >= 1.0) return {.first = 0, .last = RankBandSize::kAll};
  const auto kept = portion(density, n);
  const auto first = std::min(std::min(portion(input.parameters["gamma"], n), n), n - kept);
  return {.first = first, .last = first + kept};
}

template <class T, Vote vote>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState*) {
  return merge_task_vectors<T>(
      context,
      {.vote = vote == Vote::kNone || context.dialect != Dialect::kPeft ? vote : Vote::kUnweighted,
       .rescale = rescale_of(context, Rescale::kL1),
       .normalize = context.shared["normalize"] != 0.0},
      keep_band<T>(context, band));
}

}  // namespace

constinit const Method kBreadcrumbs{.name = "breadcrumbs",
                                    .summary = "drop the smallest and the very largest entries of each task vector",
                                    .paper = "Davari and Belilovsky 2023, arXiv:2312.06795",
                                    .base = Method::Base::kRequired,
                                    .parameters = kParameters,
                                    .problem = problem,
                                    .copies = copies_base,
                                    .make_float = make<float, Vote::kNone>,
                                    .make_double = make<double, Vote::kNone>};

constinit const Method kBreadcrumbsTies{.name = "breadcrumbs_ties",
                                        .summary = "breadcrumbs with the sign election of TIES",
                                        .paper = "Davari and Belilovsky 2023, arXiv:2312.06795",
                                        .base = Method::Base::kRequired,
                                        .parameters = kParameters,
                                        .problem = problem,
                                        .copies = copies_base,
                                        .make_float = make<float, Vote::kWeighted>,
                                        .make_double = make<double, Vote::kWeighted>};

}  // namespace mergex::merging
