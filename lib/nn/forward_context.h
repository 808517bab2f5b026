#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "tensor/random_streams.h"
#include "tensor/tensor.h"

namespace mergex::nn {

/// What flows beside the activations through one forward pass.
struct ForwardContext {
  bool training = false;
  tensor::RandomStreams* random = nullptr;  ///< needed while training with dropout or noise
  /// Keep the activations between blocks alone, and compute a block's own again in the backward pass.
  bool recompute_blocks = false;

  /// [B, T] of the stack that runs now: 1 for a real token, 0 for padding; undefined when all are real.
  Tensor mask_BT = {};

  /// Balance losses of the routers of this pass, each a scalar to be added to the task's loss.
  std::vector<Tensor> auxiliary_losses = {};

  /// Called with a name ("encoder.hidden.3") and the activation, where set.
  std::function<void(std::string_view, const Tensor&)> probe = {};
  void observe(std::string_view name, const Tensor& activation) const {
    if (probe) probe(name, activation);
  }
};

/// Zeroes each entry with probability `p` and scales the others by 1/(1-p), while training; draws from the stream
/// "dropout".
Tensor dropout(const Tensor& x, double p, ForwardContext& context);

}  // namespace mergex::nn
