#pragma once

#include <filesystem>
#include <string>

#include "backbones/backbone.h"
#include "routing/expert_layer.h"

namespace mergex::engine {

/// A model and what a checkpoint folder of it holds besides weights.
struct Model {
  std::shared_ptr<backbones::Backbone> backbone;
  routing::ExpertSet experts;             ///< empty for a dense model
  io::Json expert_options;                ///< the resolved `experts` section
  std::filesystem::path tokenizer_file;   ///< copied into every checkpoint
};

/// model.safetensors + config.json + tokenizer: a Hugging Face folder (with experts: the dense backbone, the base
/// expert in each merged linear's place). experts.safetensors + experts.json: what the dense model has no place for.
void write_model(const Model& model, const std::filesystem::path& folder);

/// Reads back what `write_model` wrote, bit by bit. @throws UserError when something is missing or does not fit
void read_model(Model& model, const std::filesystem::path& folder);

/// The experts alone, from a folder that has them. @return false when it has none
/// @throws UserError when they are not those of this model, tensor for tensor
bool read_experts(Model& model, const std::filesystem::path& folder, bool check_only);

struct ModelCounts {
  std::int64_t dense = 0, head = 0;
  routing::ParameterCounts experts;
  std::int64_t total() const { return dense + head + experts.experts + experts.routers + experts.curvature; }
};

/// Parameters by what they belong to; `dense` counts the backbone without a classification head.
ModelCounts count_parameters(const Model& model);

}  // namespace mergex::engine
