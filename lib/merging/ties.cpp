#include "core/error.h"
#include "merging/magnitude.h"
#include "merging/methods.h"

namespace mergex::merging {
namespace {

enum class TrimScope { kDialect, kTensor, kGlobal };
constexpr std::string_view kTrimScopes[] = {"by_dialect", "tensor", "global"};
constexpr std::string_view kNormalize[] = {"false", "true", "by_dialect"};

constexpr Parameter kParameters[] = {
    kWeight,
    kDensity,
    kLambda,
    {.name = "normalize",
     .scope = Parameter::Scope::kShared,
     .kind = Parameter::Kind::kChoice,
     .fallback = 2.0,
     .choices = kNormalize,
     .summary =
         "divide by the weights (or the number) of those that agree; by_dialect: false in fusion_bench's, else true"},
    {.name = "trim_scope",
     .scope = Parameter::Scope::kShared,
     .kind = Parameter::Kind::kChoice,
     .fallback = 0.0,
     .choices = kTrimScopes,
     .summary =
         "rank within each tensor or the whole model; by_dialect: global in paper and fusion_bench, else tensor"},
    rescale_parameter(false),
    kInt8Mask};

/// The published vote: no weights, and the majority of the whole model decides where votes cancel.
bool is_published(Dialect dialect) { return dialect == Dialect::kPaper || dialect == Dialect::kFusionBench; }

bool trims_globally(const TensorContext& context) {
  switch (static_cast<TrimScope>(context.shared["trim_scope"])) {
    case TrimScope::kTensor: return false;
    case TrimScope::kGlobal: return true;
    case TrimScope::kDialect: break;
  }
  return is_published(context.dialect);
}

std::string problem(const TensorContext& context) {
  for (const auto& input : context.inputs) {
    if (is_published(context.dialect) && input.parameters["weight"] != 1.0) {
      return fmt::format(
          "ties has no weights in this dialect (got {}); set weight to 1, or dialect to mergekit or peft",
          input.parameters["weight"]);
    }
  }
  const auto rescale = rescale_of(context, Rescale::kL1);
  if (rescale != Rescale::kNone && rescale != Rescale::kL1) {
    return "ties can only rescale by l1; its trimming is not random";
  }
  return "";
}

/// What the tensors of a model share: the ranks of a global trim and the votes' majority.
class TiesModel final : public ModelState, public MajoritySign {
 public:
  explicit TiesModel(const TensorContext& context) {
    if (trims_globally(context)) trim_ = std::make_unique<GlobalTrim>(context.inputs.size());
  }

  GlobalTrim* trim() { return trim_.get(); }
  void finish(int pass) override {
    if (trim_) trim_->finish(pass);
  }
  void add(std::int64_t positive_minus_negative) override { votes_ += positive_minus_negative; }
  bool is_negative() const override { return votes_ < 0; }

 private:
  std::unique_ptr<GlobalTrim> trim_;
  std::int64_t votes_ = 0;
};

std::shared_ptr<ModelState> model_state(const TensorContext& context) {
  if (!trims_globally(context) && !is_published(context.dialect)) return nullptr;
  return std::make_shared<TiesModel>(context);
}

template <class T>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState* state) {
  auto* model = static_cast<TiesModel*>(state);
  std::unique_ptr<Sparsifier<T>> sparsifier;
  if (trims_globally(context)) {
    if (model == nullptr || model->trim() == nullptr)
      fail("{}: trim_scope has to be the same for all tensors", context.name);
    if constexpr (std::is_same_v<T, float>) {
      sparsifier = trim_globally(context, *model->trim());
    } else {
      fail("{}: float64 tensors cannot be trimmed over the whole model; set dtype to float32, or trim_scope to tensor",
           context.name);
    }
  } else {
    sparsifier = keep_band<T>(context, [](const TensorContext::Input& input, std::int64_t n) {
      const double density = input.parameters["density"];
      return density <= 0.0 ? RankBandSize{}
                            : RankBandSize{.first = 0, .last = std::max<std::int64_t>(1, portion(density, n))};
    });
  }
  constexpr double kByDialect = 2.0;
  const double normalize = context.shared["normalize"];
  return merge_task_vectors<T>(
      context,
      {.vote = context.dialect == Dialect::kPeft ? Vote::kUnweighted : Vote::kWeighted,
       .rescale = rescale_of(context, Rescale::kL1),
       .normalize = normalize == kByDialect ? context.dialect != Dialect::kFusionBench : normalize != 0.0},
      std::move(sparsifier), is_published(context.dialect) ? model : nullptr);
}

}  // namespace

constinit const Method kTies{.name = "ties",
                             .summary = "trim task vectors, elect a sign per element, average those that agree",
                             .paper = "Yadav et al. 2023, arXiv:2306.01708",
                             .base = Method::Base::kRequired,
                             .parameters = kParameters,
                             .problem = problem,
                             .copies = copies_base,
                             .model_state = model_state,
                             .make_float = make<float>,
                             .make_double = make<double>};

}  // namespace mergex::merging
