#include "routing/merged_linear.h"
#include "routing/method.h"
#include "routing/noisy_top_k.h"
#include "routing/options.h"
#include "routing/smear.h"

namespace mergex::routing {

constinit const Method kSoftMerge{
    .name = "soft_merge",
    .summary = "one weight per sentence, the score-weighted mean of the experts: SMEAR, or MEO with router noisy_top_k",
    .paper = "Muqeeth et al. 2023, arXiv:2306.03745; He et al. 2023, arXiv:2310.09832",
    .routes_sentences = true,
    .configure = [](io::JsonObject& options, Profile profile) -> ConfiguredMethod {
      MergedLinearOptions o;
      o.has_base = false;
      o.num_experts = read_num_experts(options, 8);
      auto routing = read_router(options, o.num_experts,
                                 {.kind = &kSmear,
                                  .top_k = std::min<std::int64_t>(2, o.num_experts),
                                  .levels = {"sequence", "token"}});
      o.make_router = std::move(routing.router.make);
      o.scores_sum_to_one = routing.router.scores_sum_to_one;
      o.auxiliary_coefficient = read_auxiliary_loss(options, *routing.kind, 0.01);
      o.router_per_feed_forward = read_router_per_feed_forward(options);
      o.pool_padding = read_pool_padding(options, profile);
      if (routing.level == "token") {
        o.adapter_reduction = 64;
        options.optional("adapter_reduction", o.adapter_reduction, {.at_least = 1, .at_most = 1e6});
      }
      return {.make_layer = [o](const LayerPlace& place) { return std::make_shared<MergedLinear>(place, o); },
              .depends_on_padding = o.pool_padding};
    }};

}  // namespace mergex::routing
