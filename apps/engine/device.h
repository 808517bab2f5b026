#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace mergex::engine {

/// "cpu", "cuda", "cuda:1", or "auto": the first GPU where one can be used, else the CPU. Loads LibTorch's CUDA part
/// when it is wanted. @throws UserError that says what is missing
at::Device choose_device(const std::string& name);

}  // namespace mergex::engine
