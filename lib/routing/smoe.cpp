#include "routing/method.h"
#include "routing/options.h"
#include "routing/smoe_linear.h"

namespace mergex::routing {

constinit const Method kSmoe{
    .name = "smoe",
    .summary = "sparse mixture of experts: each token is sent to its top k experts",
    .paper = "Shazeer et al. 2017, arXiv:1701.06538",
    .routes_sentences = false,
    .configure = [](io::JsonObject& options) -> MakeLayer {
      SmoeLinearOptions o;
      o.num_experts = read_num_experts(options, 8);
      options.optional("auxiliary_loss", o.auxiliary_coefficient, {.at_least = 0.0});
      o.make_router = read_router(options, o.num_experts, std::min<std::int64_t>(2, o.num_experts), "token");
      return [o](const Tensor& dense_OI) { return std::make_shared<SmoeLinear>(dense_OI, o); };
    }};

}  // namespace mergex::routing
