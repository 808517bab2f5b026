#pragma once

#include "memory_estimate.h"

namespace mergex::engine {

/// Multiply-adds of matrix products in a forward pass; elementwise work is left out.
struct MultiplyAdds {
  double sentence = 0.0;   ///< one sentence of the longest length, merging and routing included
  double merging = 0.0;    ///< of these, what merges a sentence's weights
  double curvature = 0.0;  ///< once a step, whatever the batch; gone in evaluation, which folds it in
};

/// Source of the terms with experts: apply T O I, merge N O I, curvature R N O I (a1 + a2 + b1 + b2) for factors of
/// O = a1 a2 and I = b1 b2.
MultiplyAdds count_multiply_adds(const MemoryFactors& factors);

}  // namespace mergex::engine
