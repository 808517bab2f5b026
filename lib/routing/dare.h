#pragma once

#include <ATen/core/Generator.h>

#include "routing/protocol.h"

namespace mergex::routing {

/// Drops each entry of a tensor like `dropped` with probability `p` and rescales the others by 1/(1-p). Of task vectors [N, O, I] it is DARE; of scores [U, N] it drops the whole task vector of an
/// expert for a unit, as the authors' public code of CAMEx does.
/// Source: Yu et al. 2024 (arXiv:2311.03099), with a fresh mask a step as in Nguyen et al. 2025 (arXiv:2502.18821).
EntryMask dare_mask(const Tensor& dropped, double p, at::Generator& generator);

}  // namespace mergex::routing
