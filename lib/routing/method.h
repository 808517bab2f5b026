#pragma once

#include <functional>
#include <span>

#include "nn/feed_forward.h"
#include "routing/expert_layer.h"
#include "routing/profile.h"

namespace mergex::io {
class JsonObject;
}

namespace mergex::routing {

/// Builds the layer that stands in the place of a dense linear.
using MakeLayer = std::function<std::shared_ptr<ExpertLayer>(const LayerPlace& place)>;

/// An expert method whose options are read.
struct ConfiguredMethod {
  MakeLayer make_layer;
  bool depends_on_padding = false;  ///< how far a batch is padded changes its results
  bool needs_cpu = false, needs_float32 = false;  ///< for a kernel that is forced
};

/// An expert method as recipes name it.
struct Method {
  const char* name;
  const char* summary;
  const char* paper;
  bool routes_sentences;  ///< scores depend on all positions of a sentence: no use in a decoder that generates
  ConfiguredMethod (*configure)(io::JsonObject& options, Profile profile);
};

std::span<const Method* const> method_registry();

extern const Method kCamex, kSoftMerge, kSmoe;

/// What the recipe's `experts` section asks for.
struct ExpertOptions {
  std::string method;
  bool routes_sentences = false;
  std::string origin;                ///< where the section stands, for messages
  std::vector<std::string> linears;  ///< which projections; empty: all of the feed-forward
  MakeLayer make_layer;
  bool depends_on_padding = false;   ///< batches must be padded to the task's max_length, and not sorted by length
  bool needs_cpu = false, needs_float32 = false;  ///< for a kernel that is forced

  /// @throws UserError for unknown names (with the nearest one), values out of range and what does not go together
  static ExpertOptions read(io::JsonObject options);
};

/// Upcycling: puts an expert layer, every expert a copy of the dense weight, in the place of each named linear of
/// each feed-forward. The model computes what it computed before.
/// @throws UserError when a name is no linear of this model, or sentences would be routed in a generating decoder
ExpertSet upcycle(const std::vector<nn::FeedForwardSite>& sites, const ExpertOptions& options,
                  at::Generator& generator);

}  // namespace mergex::routing
