#pragma once

#include <vector>

#include "io/json_object.h"
#include "merging/merge_adapters.h"

namespace mergex::merging {

/// A `merge` section that names `adapters` in the place of models: what they are and how they become one adapter.
struct AdapterSection {
  std::vector<AdapterInput> inputs;
  MergeAdaptersOptions options;
};

/// Whether a recipe's `merge` is about adapters alone.
bool merges_adapters(const io::JsonObject& root);

/// @param root  the recipe; `merge` is claimed
/// @throws UserError for everything that is wrong with it, and for folders that hold no LoRA adapter
AdapterSection read_adapter_section(io::JsonObject& root, std::uint64_t seed);

}  // namespace mergex::merging
