#pragma once

#include <functional>
#include <span>

#include "io/json_object.h"
#include "routing/profile.h"
#include "tensor/random_streams.h"
#include "tensor/tensor.h"

namespace mergex::routing {

// U routed units, N experts, O out_features, I in_features

/// Which entries of the task vectors take part in the merge, without gradient.
struct EntryMask {
  Tensor keep_NOI;     ///< bool; undefined keeps everything
  double scale = 1.0;  ///< of what is kept

  EntryMask(Tensor keep = {}, double scale_of_kept = 1.0) : keep_NOI(std::move(keep)), scale(scale_of_kept) {}
};

/// Drawn or computed once per optimiser step from experts [N, O, I] and their base [O, I].
/// @param random  the run's streams; only read while training
using Mask = std::function<EntryMask(const Tensor& experts_NOI, const Tensor& base_OI, bool training,
                                     tensor::RandomStreams* random)>;

/// Which experts take part in the merge of each routed unit: [U, N] multiplied into the scores, without gradient. Drawn
/// anew in every forward pass of training; evaluation does not ask.
using UnitMask = std::function<Tensor(const Tensor& scores_UN, tensor::RandomStreams& random)>;

/// What a protocol leaves out. An empty function keeps everything.
struct Masks {
  Mask entries = {};
  UnitMask units = {};
};

/// A merging protocol inside a layer, as recipes name it.
struct Protocol {
  const char* name;
  const char* summary;
  const char* paper;
  /// Reads its options from the recipe's `experts` section.
  Masks (*configure)(io::JsonObject& options, Profile profile);
};

std::span<const Protocol* const> protocol_registry();

extern const Protocol kDomainSpecific, kTies, kDare;

}  // namespace mergex::routing
