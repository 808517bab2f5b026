#pragma once

#include "tensor/tensor.h"

namespace mergex::nn {

/// T5's buckets of relative positions: the near half exact, the far half logarithmic.
/// @param relative_position  int64, key position minus query position
/// @param bidirectional      whether later keys get half of the buckets (encoder) or share bucket 0 (decoder)
/// @return int64 in [0, num_buckets)
/// Source: Raffel et al. 2020, section 2.1 (arXiv:1910.10683).
Tensor relative_position_bucket(const Tensor& relative_position, bool bidirectional, std::int64_t num_buckets,
                                std::int64_t max_distance);

}  // namespace mergex::nn
