#pragma once

#include <functional>
#include <span>
#include <vector>

#include "nn/forward_context.h"

namespace mergex::nn {

/// A part of a model as a function of the tensors that flow into it; its parameters come along by themselves.
using Part = std::function<Tensor(std::span<const Tensor> inputs, ForwardContext& context)>;

/// What `part` gives, with the same gradients, but without keeping what it computes on the way: the backward pass
/// computes it again, with the same random numbers and in the same precision (Chen et al. 2016, arXiv:1604.06174).
/// Gradients of parameters, and of leaves that `part` captures, are added to `.grad` by that pass; balance losses
/// count once.
/// @param inputs  defined tensors
Tensor recomputed(const Part& part, const std::vector<Tensor>& inputs, ForwardContext& context);

}  // namespace mergex::nn
