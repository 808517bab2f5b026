#pragma once

#include <ATen/core/Generator.h>

#include "tensor/tensor.h"

namespace mergex::tensor {

/// Which entries of a tensor stay when each is dropped with probability p.
struct RandomMask {
  Tensor keep;   ///< bool
  double scale;  ///< 1 / the chance to stay: its product with `keep` has the expectation 1
};

/// Sixteen random bits decide on an entry, so that p is rounded to a multiple of 2^-16 (and `scale` with it); p in [0, 1).
RandomMask draw_mask(at::IntArrayRef sizes, double p, at::Device device, at::Generator& generator);

}  // namespace mergex::tensor
