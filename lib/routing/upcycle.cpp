#include <torch/torch.h>

#include <algorithm>

#include "core/error.h"
#include "core/suggest.h"
#include "routing/method.h"
#include "routing/options.h"

namespace mergex::routing {

ExpertSet upcycle(const std::vector<nn::FeedForwardSite>& sites, const ExpertOptions& options,
                  at::Generator& generator) {
  ExpertSet set;
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
    for (const auto& name : names) {
      if (!options.linears.empty() && std::ranges::find(options.linears, name) == options.linears.end()) continue;
      const auto dense = std::dynamic_pointer_cast<nn::Linear>(site.module->projection(name));
      TORCH_CHECK(dense != nullptr, site.name, ".", name, " is not dense");
      auto layer = options.make_layer(dense->weight);
      if (!dense->weight.is_meta()) layer->initialize(generator);  // a dry run only counts
      site.module->replace_projection(name, layer);
      set.add(site.name + "." + name, std::move(layer));
    }
  }
  return set;
}

}  // namespace mergex::routing
