#pragma once

#include <memory>
#include <string>
#include <vector>

#include "nn/linear.h"

namespace mergex::nn {

/// The feed-forward slot of a block. Its matrix products stand in named `Projection` slots ("wi", "wo"), so that a
/// backbone knows nothing of the experts that may be put there.
struct FeedForward : torch::nn::Module {
  /// [B, T, D] -> [B, T, D]
  virtual Tensor forward(const Tensor& x_BTD, ForwardContext& context) = 0;

  /// In the order in which `forward` calls them.
  virtual std::vector<std::string> projection_names() const = 0;
  virtual std::shared_ptr<Projection>& projection(const std::string& name) = 0;

  /// Puts `replacement` in the place of the projection `name`, under the same name.
  void replace_projection(const std::string& name, std::shared_ptr<Projection> replacement);
};

/// A feed-forward and its place in the model.
struct FeedForwardSite {
  std::string name;  ///< "encoder.block.0.layer.1.DenseReluDense"
  std::shared_ptr<FeedForward> module;
  bool autoregressive;  ///< position t must not see later positions (a decoder that generates)
  std::string stack;    ///< "encoder": the chain of like blocks that it belongs to
};

}  // namespace mergex::nn
