#include "core/error.h"
#include "core/suggest.h"
#include "routing/merged_linear.h"
#include "routing/method.h"
#include "routing/options.h"

namespace mergex::routing {

constinit const Method kCamex{
    .name = "camex",
    .summary = "one weight per sentence, merged from base and experts, optionally with curvature",
    .paper = "Nguyen et al. 2025, arXiv:2502.18821",
    .routes_sentences = true,
    .configure = [](io::JsonObject& options) -> MakeLayer {
      MergedLinearOptions o;
      o.num_experts = read_num_experts(options, 7);
      options.optional("alpha", o.alpha, {.at_least = 0.0});
      const auto protocols = protocol_registry();
      const auto& protocol = *protocols[options.choice("protocol", names_of(protocols), 0)];
      o.mask = protocol.configure(options);
      if (auto curvature = options.object("curvature")) {
        o.curvature_rank = 1;
        curvature->optional("rank", o.curvature_rank, {.at_least = 1, .at_most = 1024});
        curvature->finish();
      }
      o.auxiliary_coefficient = 0.0;
      options.optional("auxiliary_loss", o.auxiliary_coefficient, {.at_least = 0.0});
      o.make_router = read_router(options, o.num_experts, o.num_experts, "sequence");
      const std::vector<std::string> forms{"automatic", "base", "absorbed"};
      o.form = static_cast<Form>(options.choice("form", forms, 0));
      return [o](const Tensor& dense_OI) { return std::make_shared<MergedLinear>(dense_OI, o); };
    }};

}  // namespace mergex::routing
