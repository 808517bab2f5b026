#pragma once

#include <torch/nn/module.h>

#include "nn/forward_context.h"

namespace mergex::nn {

/// A place for a matrix product inside a block: dense by default; experts are put in its place by `routing`.
/// O out_features, I in_features
struct Projection : torch::nn::Module {
  /// [..., I] -> [..., O]
  virtual Tensor forward(const Tensor& x, ForwardContext& context) = 0;
};

/// y = x W^T, W stored [O, I] and left unset: it is loaded or initialised by the model.
struct Linear : Projection {
  Linear(std::int64_t in_features, std::int64_t out_features, const at::TensorOptions& options);
  Tensor forward(const Tensor& x, ForwardContext& context) override;

  Tensor weight;  // [O, I]
};

/// Root-mean-square norm without mean or bias (Zhang and Sennrich 2019), computed in float32 or wider.
struct RmsNorm : torch::nn::Module {
  RmsNorm(std::int64_t size, double epsilon, const at::TensorOptions& options);
  Tensor forward(const Tensor& x);

  Tensor weight;  // [size]
  double epsilon;
};

}  // namespace mergex::nn
