#pragma once

#include <ATen/core/Tensor.h>

namespace mergex {

using at::Tensor;

}  // namespace mergex
