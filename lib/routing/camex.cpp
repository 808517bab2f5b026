#include "core/log.h"
#include "routing/merged_linear.h"
#include "routing/method.h"
#include "routing/noisy_top_k.h"
#include "routing/options.h"

namespace mergex::routing {
namespace {

void read_curvature(io::JsonObject& options, Profile profile, MergedLinearOptions& o) {
  const bool release = profile == Profile::kRelease;
  if (auto curvature = options.object("curvature")) {
    o.curvature_rank = release ? 8 : 1;
    curvature->optional("rank", o.curvature_rank, {.at_least = 1, .at_most = 1024});
    const std::vector<std::string> inits{"identity_total", "identity_each_sum"};
    o.rank_init = static_cast<RankInit>(curvature->choice("rank_init", inits, release ? 1 : 0));
    const std::vector<std::string> kernels{"automatic", "fused", "contraction"};
    o.curvature_kernel = static_cast<CurvatureKernel>(curvature->choice("kernel", kernels, 0));
    curvature->finish();
  }
  options.optional("share_curvature_across_layers", o.share_curvature);
  if (o.share_curvature && o.curvature_rank == 0) {
    options.fail_value("share_curvature_across_layers", "but there is no curvature to share; add \"curvature\": {}");
  }
}

ConfiguredMethod configure(io::JsonObject& options, Profile profile) {
  const bool release = profile == Profile::kRelease;
  MergedLinearOptions o;
  o.num_experts = read_num_experts(options, 7);
  options.optional("alpha", o.alpha, {.at_least = 0.0});
  const auto protocols = protocol_registry();
  auto masks = protocols[options.choice("protocol", names_of(protocols), 0)]->configure(options, profile);
  o.mask = std::move(masks.entries);
  o.unit_mask = std::move(masks.units);
  const std::vector<std::string> orders{"before_curvature", "after_curvature"};
  o.mask_order = static_cast<MaskOrder>(options.choice("mask_order", orders, release ? 1 : 0));
  read_curvature(options, profile, o);

  auto routing = read_router(options, o.num_experts,
                             {.kind = &kNoisyTopK, .top_k = o.num_experts, .levels = {"sequence"}});
  o.make_router = std::move(routing.router.make);
  o.scores_sum_to_one = routing.router.scores_sum_to_one;
  o.auxiliary_coefficient = read_auxiliary_loss(options, *routing.kind, 0.0);
  o.router_per_feed_forward = read_router_per_feed_forward(options);
  o.pool_padding = read_pool_padding(options, profile);

  const std::vector<std::string> forms{"automatic", "base", "absorbed"};
  o.form = static_cast<Form>(options.choice("form", forms, 0));
  if (o.form == Form::kAbsorbed && !o.base_can_be_absorbed()) {
    options.fail_value("form", "but scores whose experts are dropped do not sum to 1; expected automatic or base");
  }

  const std::vector<std::string> products{"automatic", "tiled", "merged", "activations"};
  o.product = static_cast<Product>(options.choice("product", products, 0));

  const std::vector<std::string> paths{"sparse_scores", "base_free"};
  const auto top_k = routing.router.top_k;
  if (options.choice("topk_sparse_path", paths, release ? 1 : 0) == 1 && 2 * top_k < o.num_experts) {
    log::warn(
        "{}: with top_k {} of {} experts, topk_sparse_path \"base_free\" merges the selected experts alone: without "
        "base, protocol, curvature and alpha",
        options.where(), top_k, o.num_experts);
    o.has_base = false;
    o.mask = {};
    o.unit_mask = {};
    o.curvature_rank = 0;
  }
  return {.make_layer = [o](const LayerPlace& place) { return std::make_shared<MergedLinear>(place, o); },
          .depends_on_padding = o.pool_padding,
          .needs_cpu = o.product == Product::kTiled || o.curvature_kernel == CurvatureKernel::kFused,
          .needs_float32 = o.product == Product::kTiled};
}

}  // namespace

constinit const Method kCamex{
    .name = "camex",
    .summary = "one weight per sentence, merged from base and experts, optionally with curvature",
    .paper = "Nguyen et al. 2025, arXiv:2502.18821",
    .routes_sentences = true,
    .configure = configure};

}  // namespace mergex::routing
