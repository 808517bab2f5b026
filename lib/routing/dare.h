#pragma once

#include <ATen/core/Generator.h>

#include "tensor/tensor.h"

namespace mergex::routing {

/// A mask like `dropped`, that drops each of its entries with probability `p` and rescales the others by 1/(1-p): 0 or
/// 1/(1-p), expectation 1. Of task vectors [N, O, I] it is DARE; of scores [U, N] it drops the whole task vector of an
/// expert for a unit, as the authors' public code of CAMEx does.
/// Source: Yu et al. 2024 (arXiv:2311.03099), with a fresh mask a step as in Nguyen et al. 2025 (arXiv:2502.18821).
Tensor dare_mask(const Tensor& dropped, double p, at::Generator& generator);

}  // namespace mergex::routing
