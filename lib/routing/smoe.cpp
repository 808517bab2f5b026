#include "routing/method.h"
#include "routing/noisy_top_k.h"
#include "routing/options.h"
#include "routing/smoe_linear.h"

namespace mergex::routing {

constinit const Method kSmoe{
    .name = "smoe",
    .summary = "sparse mixture of experts: each token is sent to its top k experts",
    .paper = "Shazeer et al. 2017, arXiv:1701.06538",
    .routes_sentences = false,
    .configure = [](io::JsonObject& options, Profile profile) -> ConfiguredMethod {
      SmoeLinearOptions o;
      o.num_experts = read_num_experts(options, 8);
      auto routing = read_router(
          options, o.num_experts,
          {.kind = &kNoisyTopK, .top_k = std::min<std::int64_t>(2, o.num_experts), .levels = {"token"}});
      // The public code computes the balance loss of a T5 and then drops it.
      o.auxiliary_coefficient = read_auxiliary_loss(options, *routing.kind, profile == Profile::kRelease ? 0.0 : 0.01);
      o.make_router = std::move(routing.router.make);
      return {.make_layer = [o](const LayerPlace& place) { return std::make_shared<SmoeLinear>(place, o); }};
    }};

}  // namespace mergex::routing
