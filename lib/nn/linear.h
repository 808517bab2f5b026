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

/// y = x W^T, plus b where there is a bias. W is stored [O, I]; both are left unset: they are loaded or initialised by
/// the model.
struct Linear : Projection {
  Linear(std::int64_t in_features, std::int64_t out_features, const at::TensorOptions& options, bool has_bias = false);
  Tensor forward(const Tensor& x, ForwardContext& context) override;

  Tensor weight;  // [O, I]
  Tensor bias;    // [O]; undefined without one
};

/// Root-mean-square norm without mean or bias (Zhang and Sennrich 2019), computed in float32 or wider.
struct RmsNorm : torch::nn::Module {
  RmsNorm(std::int64_t size, double epsilon, const at::TensorOptions& options);
  Tensor forward(const Tensor& x);

  Tensor weight;  // [size]
  double epsilon;
};

}  // namespace mergex::nn
