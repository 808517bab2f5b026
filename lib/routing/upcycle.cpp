#include <torch/torch.h>

#include <algorithm>

#include "core/error.h"
#include "core/suggest.h"
#include "routing/method.h"
#include "routing/options.h"

namespace mergex::routing {

std::int64_t read_num_experts(io::JsonObject& options, std::int64_t fallback) {
  options.optional("num_experts", fallback, {.at_least = 1, .at_most = 4096});
  return fallback;
}

MakeRouter read_router(io::JsonObject& options, std::int64_t num_experts, std::int64_t default_top_k,
                       const std::string& level) {
  auto router = options.object_or_empty("router");
  const auto kinds = router_registry();
  const auto& kind = *kinds[router.choice("kind", names_of(kinds), 0)];
  router.choice("level", std::vector<std::string>{level}, 0);
  auto make_router = kind.configure(router, num_experts, default_top_k);
  router.finish();
  return make_router;
}

ExpertOptions ExpertOptions::read(io::JsonObject options) {
  ExpertOptions result;
  result.origin = options.where();
  const auto methods = method_registry();
  const auto names = names_of(methods);
  result.method = options.required<std::string>("method");
  const auto found = std::ranges::find(names, result.method);
  if (found == names.end()) {
    options.fail_value("method",
                       fmt::format("expected {}{}", quoted_list(names), did_you_mean(result.method, names)));
  }
  const std::string profile = [&] {
    std::string name = "paper";
    options.optional("profile", name);
    return name;
  }();
  if (profile == "release") options.fail_value("profile", "which is not built yet; expected \"paper\"");
  if (profile != "paper") options.fail_value("profile", "expected \"paper\"");
  options.optional("linears", result.linears);
  const auto& method = *methods[static_cast<std::size_t>(found - names.begin())];
  result.routes_sentences = method.routes_sentences;
  result.make_layer = method.configure(options);
  options.finish();
  return result;
}

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
