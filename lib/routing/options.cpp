#include "routing/options.h"

#include <algorithm>

#include "core/suggest.h"
#include "routing/method.h"

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
  std::string profile = "paper";
  options.optional("profile", profile);
  if (profile == "release") options.fail_value("profile", "which is not built yet; expected \"paper\"");
  if (profile != "paper") options.fail_value("profile", "expected \"paper\"");
  options.optional("linears", result.linears);
  const auto& method = *methods[static_cast<std::size_t>(found - names.begin())];
  result.routes_sentences = method.routes_sentences;
  result.make_layer = method.configure(options);
  options.finish();
  return result;
}

}  // namespace mergex::routing
