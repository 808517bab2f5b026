#pragma once

#include "nn/linear.h"

namespace mergex::routing {

/// x + Up(ReLU(Down(x))) on each token by itself: the identity at the start, for Up is zero there.
/// Source: He et al. 2023, MEO, token level (arXiv:2310.09832).
struct TokenAdapter : torch::nn::Module {
  /// @param reduction  width over the width between the two linears, which is 1 at least
  TokenAdapter(std::int64_t width, std::int64_t reduction, const at::TensorOptions& tensors);

  /// [..., width] -> the same
  Tensor forward(const Tensor& x, nn::ForwardContext& context);
  void initialize(at::Generator& generator);

  std::shared_ptr<nn::Linear> down, up;
};

}  // namespace mergex::routing
