#pragma once

#include <string>
#include <vector>

#include "routing/profile.h"
#include "routing/router.h"

namespace mergex::routing {

// Options that several methods read in the same way.

/// `num_experts`, with the method's own default.
std::int64_t read_num_experts(io::JsonObject& options, std::int64_t fallback);

struct RouterDefaults {
  const RouterKind* kind;
  std::int64_t top_k;
  std::vector<std::string> levels;  ///< that the method has, the first by default
};

struct RouterChoice {
  const RouterKind* kind;
  ConfiguredRouter router;
  std::string level;
};

/// `router: {kind, level}` and what its kind reads.
RouterChoice read_router(io::JsonObject& options, std::int64_t num_experts, const RouterDefaults& defaults);

/// `auxiliary_loss`, the coefficient of the balance loss; 0 for a router that has none.
double read_auxiliary_loss(io::JsonObject& options, const RouterKind& router, double fallback);

/// `pool_padding`: whether the mean that routes a sentence counts its padding.
bool read_pool_padding(io::JsonObject& options, Profile profile);

/// `router_scope`: whether one router serves all linears of a feed-forward.
bool read_router_per_feed_forward(io::JsonObject& options);

template <class Entries>
std::vector<std::string> names_of(const Entries& entries) {
  std::vector<std::string> names;
  for (const auto* entry : entries) names.emplace_back(entry->name);
  return names;
}

}  // namespace mergex::routing
