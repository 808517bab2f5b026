#include <torch/torch.h>

#include <algorithm>
#include <map>

#include "core/error.h"
#include "core/suggest.h"
#include "routing/method.h"
#include "routing/options.h"

namespace mergex::routing {

ExpertSet upcycle(const std::vector<nn::FeedForwardSite>& sites, const ExpertOptions& options,
                  at::Generator& generator) {
  ExpertSet set;
  std::map<std::string, std::shared_ptr<ExpertLayer>> first_of_role;
  for (const auto& site : sites) {
    const auto names = site.module->projection_names();
    for (const auto& wanted : options.linears) {
      if (std::ranges::find(names, wanted) == names.end()) {
        fail("{}/linears: \"{}\" is no linear of the feed-forward; expected {}{}", options.origin, wanted,
             quoted_list(names), did_you_mean(wanted, names));
      }
    }
    if (site.autoregressive && options.routes_sentences) {
      fail(
          "{}/method: \"{}\" routes whole sentences, which lets a decoder that generates see later tokens (at {}); "
          "use it with a classification head, or method \"smoe\"",
          options.origin, options.method, site.name);
    }
    std::shared_ptr<ExpertLayer> first_of_feed_forward;
    for (const auto& name : names) {
      if (!options.linears.empty() && std::ranges::find(options.linears, name) == options.linears.end()) continue;
      const auto dense = std::dynamic_pointer_cast<nn::Linear>(site.module->projection(name));
      TORCH_CHECK(dense != nullptr, site.name, ".", name, " is not dense");
      const auto& w = dense->weight;
      auto& first = first_of_role[fmt::format("{} {} {}x{}", site.stack, name, w.size(0), w.size(1))];
      auto layer = options.make_layer({.weight_OI = dense->weight,
                                       .bias_O = dense->bias,
                                       .first_of_feed_forward = first_of_feed_forward,
                                       .first_of_role = first});
      if (first == nullptr) first = layer;
      if (first_of_feed_forward == nullptr) first_of_feed_forward = layer;
      if (!dense->weight.is_meta()) layer->initialize(generator);  // a dry run only counts
      site.module->replace_projection(name, layer);
      set.add(site.name + "." + name, std::move(layer));
    }
  }
  return set;
}

}  // namespace mergex::routing
