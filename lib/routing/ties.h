#pragma once

#include "tensor/tensor.h"

namespace mergex::routing {

/// Entries of each task vector whose sign is the elected one (the sign of the sum over experts), after trimming each
/// vector to its floor(density * O * I) entries of largest magnitude (equal ones: the lower index is kept). An untrimmed zero agrees with an election that
/// is exactly zero, so that freshly upcycled experts all take part. No averaging and no rescaling: inside a layer the
/// router's scores weigh what is kept.
/// @param task_vectors_NOI  raw, not curved or scored
/// @return bool
/// Source: Yadav et al. 2023 (arXiv:2306.01708), as applied by Nguyen et al. 2025 (arXiv:2502.18821).
Tensor ties_mask(const Tensor& task_vectors_NOI, double density);

/// The same from experts [N, O, I] and base [O, I]; without trimming, on the CPU, task vectors are not stored.
Tensor ties_mask(const Tensor& experts_NOI, const Tensor& base_OI, double density);

}  // namespace mergex::routing
