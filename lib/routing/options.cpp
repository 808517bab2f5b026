#include "routing/options.h"

#include <algorithm>

#include "core/suggest.h"
#include "routing/method.h"

namespace mergex::routing {

std::int64_t read_num_experts(io::JsonObject& options, std::int64_t fallback) {
  options.optional("num_experts", fallback, {.at_least = 1, .at_most = 4096});
  return fallback;
}

RouterChoice read_router(io::JsonObject& options, std::int64_t num_experts, const RouterDefaults& defaults) {
  auto router = options.object_or_empty("router");
  const auto kinds = router_registry();
  const auto fallback = std::ranges::find(kinds, defaults.kind) - kinds.begin();
  const auto* kind = kinds[router.choice("kind", names_of(kinds), static_cast<std::size_t>(fallback))];
  const auto& level = defaults.levels[router.choice("level", defaults.levels, 0)];
  auto configured = kind->configure(router, num_experts, defaults.top_k);
  router.finish();
  return {kind, std::move(configured), level};
}

double read_auxiliary_loss(io::JsonObject& options, const RouterKind& router, double fallback) {
  double coefficient = router.has_balance_loss ? fallback : 0.0;
  options.optional("auxiliary_loss", coefficient, {.at_least = 0.0});
  if (coefficient > 0.0 && !router.has_balance_loss) {
    options.fail_value("auxiliary_loss", fmt::format("but router \"{}\" has no balance loss; remove it", router.name));
  }
  return coefficient;
}

bool read_pool_padding(io::JsonObject& options, Profile profile) {
  const std::vector<std::string> names{"exclude", "include"};
  return options.choice("pool_padding", names, profile == Profile::kRelease ? 1 : 0) == 1;
}

bool read_router_per_feed_forward(io::JsonObject& options) {
  const std::vector<std::string> names{"per_linear", "per_ffn"};
  return options.choice("router_scope", names, 0) == 1;
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
  const std::vector<std::string> profiles{"paper", "release"};
  const auto profile = options.choice("profile", profiles, 0) == 0 ? Profile::kPaper : Profile::kRelease;
  options.optional("linears", result.linears);
  const auto& method = *methods[static_cast<std::size_t>(found - names.begin())];
  result.routes_sentences = method.routes_sentences;
  auto configured = method.configure(options, profile);
  result.make_layer = std::move(configured.make_layer);
  result.depends_on_padding = configured.depends_on_padding;
  result.needs_cpu = configured.needs_cpu;
  result.needs_float32 = configured.needs_float32;
  options.finish();
  return result;
}

}  // namespace mergex::routing
