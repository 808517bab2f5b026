#include <algorithm>
#include <array>
#include <stdexcept>

#include "merging/source.h"
#include "merging/span_kernels.h"

namespace mergex::merging {
namespace {

template <class T>
void widen(io::DType dtype, std::int64_t count, const void* from, T* to) {
  const auto& k = span_kernels<T>();
  switch (dtype) {
    case io::DType::kF16: return k.widen_f16(count, from, to);
    case io::DType::kBF16: return k.widen_bf16(count, from, to);
    case io::DType::kF32: return k.widen_f32(count, from, to);
    case io::DType::kF64: return k.widen_f64(count, from, to);
    default: throw std::logic_error("only floating-point tensors have values to merge");
  }
}

template <class T>
std::int64_t narrow(io::DType dtype, std::int64_t count, const T* from, void* to) {
  const auto& k = span_kernels<T>();
  switch (dtype) {
    case io::DType::kF16: return k.narrow_f16(count, from, to);
    case io::DType::kBF16: return k.narrow_bf16(count, from, to);
    case io::DType::kF32: return k.narrow_f32(count, from, to);
    case io::DType::kF64: return k.narrow_f64(count, from, to);
    default: throw std::logic_error("only floating-point tensors have values to merge");
  }
}

}  // namespace

void widen_values(io::DType dtype, std::int64_t count, const void* from, float* to) { widen(dtype, count, from, to); }
void widen_values(io::DType dtype, std::int64_t count, const void* from, double* to) { widen(dtype, count, from, to); }
std::int64_t narrow_values(io::DType dtype, std::int64_t count, const float* from, void* to) {
  return narrow(dtype, count, from, to);
}
std::int64_t narrow_values(io::DType dtype, std::int64_t count, const double* from, void* to) {
  return narrow(dtype, count, from, to);
}

namespace {

/// Whether every value of `from` is a value of `to`.
bool holds(io::DType to, io::DType from) {
  return to == from || to == io::DType::kF64 || (to == io::DType::kF32 && from != io::DType::kF64);
}

/// Rounds to `cast` and back, a block at a time; float64 in double, so that it is rounded once.
template <class T>
void read_rounded(const io::TensorView& view, io::DType cast, const std::byte* from, std::int64_t count, T* out) {
  std::array<double, kBlock> values;
  std::array<double, kBlock> rounded;  // room for the widest type
  const auto size = static_cast<std::int64_t>(io::dtype_size(view.dtype));
  for (std::int64_t i = 0; i < count; i += kBlock) {
    const auto n = std::min(kBlock, count - i);
    widen(view.dtype, n, from + i * size, values.data());
    narrow(cast, n, values.data(), rounded.data());
    widen(cast, n, rounded.data(), out + i);
  }
}

template <class T>
void read_stored(const io::TensorView& view, std::optional<io::DType> cast, std::int64_t begin, std::int64_t count,
                 T* out) {
  if (begin < 0 || count < 0 || count > view.num_elements() - begin) {
    throw std::logic_error("\"" + view.name + "\" has no such elements");
  }
  const auto* from = view.bytes.data() + begin * static_cast<std::int64_t>(io::dtype_size(view.dtype));
  if (cast) {
    read_rounded(view, *cast, from, count, out);
  } else {
    widen(view.dtype, count, from, out);
  }
}

}  // namespace

StoredTensor::StoredTensor(const io::TensorView& view, std::optional<io::DType> cast) : view_(&view) {
  if (cast && !holds(*cast, view.dtype)) cast_ = cast;
}

void StoredTensor::read(std::int64_t begin, std::int64_t count, float* out) const {
  read_stored(*view_, cast_, begin, count, out);
}
void StoredTensor::read(std::int64_t begin, std::int64_t count, double* out) const {
  read_stored(*view_, cast_, begin, count, out);
}

const io::TensorView* StoredTensor::stored() const { return cast_ ? nullptr : view_; }

}  // namespace mergex::merging
