#pragma once

#include <string>

#include "io/safetensors.h"
#include "tensor/tensor.h"

namespace mergex::tensor {

/// A copy of what a file holds, on the CPU, in the file's dtype.
Tensor to_tensor(const io::TensorView& view);

/// A view of a contiguous CPU tensor, for writing; valid while `t` lives.
io::TensorView view_of(std::string name, const Tensor& t);

/// `[768, 3072]`
std::string shape_text(at::IntArrayRef sizes);

/// "float32", "float64", "bfloat16" <-> at::ScalarType. @throws UserError for other names
at::ScalarType dtype_from_name(const std::string& name);
std::string dtype_name(at::ScalarType dtype);

}  // namespace mergex::tensor
