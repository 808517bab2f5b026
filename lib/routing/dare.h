#pragma once

#include <ATen/core/Generator.h>

#include "tensor/tensor.h"

namespace mergex::routing {

/// Drops each entry of the task vectors with probability `p` and rescales the others by 1/(1-p): 0 or 1/(1-p), of the
/// same shape; its expectation is 1.
/// Source: Yu et al. 2024 (arXiv:2311.03099), with a fresh mask a step as in Nguyen et al. 2025 (arXiv:2502.18821).
Tensor dare_mask(const Tensor& task_vectors_NOI, double p, at::Generator& generator);

}  // namespace mergex::routing
