#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "io/json.h"

namespace mergex::merging {

/// A tensor of a layer: `model.layers.3.mlp.up_proj.weight` is {"model.layers", 3, "mlp.up_proj.weight"}.
struct LayerName {
  std::string stack;
  std::int64_t layer = 0;
  std::string rest;

  std::string text() const;
};

/// The layer of a tensor by its name: the number behind one of the names that stacks of layers have (layers, layer, h,
/// block, blocks), else the first number. nullopt for what stands before or behind the layers.
std::optional<LayerName> layer_of(std::string_view name);

/// Whether this model_type is one whose tensor names `layer_of` is known to read right.
bool is_known_family(std::string_view model_type);

/// Whether a tensor outside the layers stands before them (embeddings) rather than behind (final norm, heads).
bool stands_before_layers(std::string_view name);

/// Part of a model with several stacks: "encoder", "decoder", and "shared" for what is neither.
std::string module_of(std::string_view name);

/// Numbers compare as numbers: layers.2 before layers.10.
bool natural_less(std::string_view a, std::string_view b);

/// What the same architecture calls its tensors differs by a prefix, depending on the class that saved it
/// ("transformer.h.0..." or "h.0..."). @return what to put before `names` to have the most of `reference`, as
/// {removed, added}; both empty where they agree as they are.
struct Prefix {
  std::string removed, added;
  std::string apply(std::string_view name) const;
};
Prefix common_prefix(std::span<const std::string_view> names, const std::unordered_set<std::string_view>& reference);

/// Whether a filter's text names whole parts of a tensor's name: "mlp.up_proj" and "layers.1" are parts of
/// "model.layers.1.mlp.up_proj.weight", "norm" is none of "q_norm".
bool has_parts(std::string_view name, std::string_view parts);

/// A buffer that is no weight (masks, position ids, rotary frequencies): never computed with.
bool is_buffer_name(std::string_view name, std::span<const std::int64_t> shape);

/// config.json's key for the number of layers of a stack; empty where there is none.
std::string layer_count_key(const io::Json& config, std::string_view stack);

/// config.json's tie_word_embeddings, or what this model_type means without it.
bool ties_embeddings(const io::Json& config);

}  // namespace mergex::merging
