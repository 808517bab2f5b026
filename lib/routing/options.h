#pragma once

#include <string>
#include <vector>

#include "routing/router.h"

namespace mergex::routing {

// Options that several methods read in the same way.

/// `num_experts`, with the method's own default.
std::int64_t read_num_experts(io::JsonObject& options, std::int64_t fallback);

/// `router: {kind, top_k, level}`. @param level  the one level of routing that the method has
MakeRouter read_router(io::JsonObject& options, std::int64_t num_experts, std::int64_t default_top_k,
                       const std::string& level);

template <class Entries>
std::vector<std::string> names_of(const Entries& entries) {
  std::vector<std::string> names;
  for (const auto* entry : entries) names.emplace_back(entry->name);
  return names;
}

}  // namespace mergex::routing
