#include "listing.h"

#include <fmt/format.h>

#include "backbones/backbone.h"
#include "routing/method.h"
#include "routing/protocol.h"
#include "routing/router.h"
#include "statistics/registry.h"
#include "tasks/registry.h"
#include "training/optimizer.h"

namespace mergex::engine {
namespace {

template <class Entries>
void print_section(const char* title, const Entries& entries) {
  fmt::print("{}\n", title);
  for (const auto* entry : entries) fmt::print("  {:<20} {}\n", entry->name, entry->summary);
}

}  // namespace

int print_list() {
  print_section("backbones (config.json: model_type)", backbones::registry());
  print_section("expert methods (/experts/method)", routing::method_registry());
  print_section("merging protocols of camex (/experts/protocol)", routing::protocol_registry());
  print_section("routers (/experts/router/kind)", routing::router_registry());
  print_section("tasks (/task/name)", tasks::registry());
  print_section("optimizers (/training/optimizer/name)", training::optimizer_registry());
  print_section("metrics (each task says which are its own)", statistics::metrics());
  return 0;
}

}  // namespace mergex::engine
