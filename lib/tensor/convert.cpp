#include "tensor/convert.h"

#include <torch/torch.h>

#include <array>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace mergex::tensor {
namespace {

constexpr std::array<std::pair<io::DType, at::ScalarType>, 13> kDTypes{{
    {io::DType::kBool, at::kBool},
    {io::DType::kU8, at::kByte},
    {io::DType::kI8, at::kChar},
    {io::DType::kU16, at::kUInt16},
    {io::DType::kI16, at::kShort},
    {io::DType::kF16, at::kHalf},
    {io::DType::kBF16, at::kBFloat16},
    {io::DType::kU32, at::kUInt32},
    {io::DType::kI32, at::kInt},
    {io::DType::kF32, at::kFloat},
    {io::DType::kU64, at::kUInt64},
    {io::DType::kI64, at::kLong},
    {io::DType::kF64, at::kDouble},
}};

}  // namespace

Tensor to_tensor(const io::TensorView& view) {
  for (const auto& [file, ours] : kDTypes) {
    if (file != view.dtype) continue;
    Tensor t = torch::empty(view.shape, ours);
    if (!view.bytes.empty()) std::memcpy(t.data_ptr(), view.bytes.data(), view.bytes.size());
    return t;
  }
  throw std::logic_error("a dtype without a torch counterpart");
}

io::TensorView view_of(std::string name, const Tensor& t) {
  TORCH_CHECK(t.is_contiguous() && t.device().is_cpu(), name, " must be contiguous and on the CPU");
  for (const auto& [file, ours] : kDTypes) {
    if (ours == t.scalar_type()) {
      return {std::move(name), file, t.sizes().vec(),
              {static_cast<const std::byte*>(t.data_ptr()), static_cast<std::size_t>(t.nbytes())}};
    }
  }
  TORCH_CHECK(false, name, " has dtype ", t.scalar_type(), ", which safetensors does not know");
}

std::string shape_text(at::IntArrayRef sizes) { return fmt::format("[{}]", fmt::join(sizes, ", ")); }

namespace {

constexpr std::array<std::pair<const char*, at::ScalarType>, 3> kModelDTypes{
    {{"float32", at::kFloat}, {"float64", at::kDouble}, {"bfloat16", at::kBFloat16}}};

}  // namespace

at::ScalarType dtype_from_name(const std::string& name) {
  for (const auto& [text, dtype] : kModelDTypes) {
    if (name == text) return dtype;
  }
  fail("\"{}\" is no dtype that models run in; expected float32, float64 or bfloat16", name);
}

std::string dtype_name(at::ScalarType dtype) {
  for (const auto& [text, ours] : kModelDTypes) {
    if (dtype == ours) return text;
  }
  throw std::logic_error("a dtype that models do not run in");
}

}  // namespace mergex::tensor
