#pragma once

#include <cstdint>
#include <optional>

#include "io/safetensors.h"

namespace mergex::merging {

/// Where the values of one input's tensor come from: a stored tensor as it is, its rows in another order, a stored
/// tensor with an adapter applied. Values are widened exactly to T. Reading is safe from several threads.
class Source {
 public:
  virtual ~Source() = default;
  Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  /// `count` values from flat index `begin` on, in row-major order.
  virtual void read(std::int64_t begin, std::int64_t count, float* out) const = 0;
  virtual void read(std::int64_t begin, std::int64_t count, double* out) const = 0;

  /// The tensor whose bytes are exactly these values in this order; nullptr where values are computed or moved.
  virtual const io::TensorView* stored() const { return nullptr; }
};

/// A stored tensor; one of integers can only be copied (`stored`), not read. @param cast  rounds every value to this type first (mergekit's `dtype`)
class StoredTensor final : public Source {
 public:
  explicit StoredTensor(const io::TensorView& view, std::optional<io::DType> cast = std::nullopt);

  void read(std::int64_t begin, std::int64_t count, float* out) const override;
  void read(std::int64_t begin, std::int64_t count, double* out) const override;
  const io::TensorView* stored() const override;

 private:
  const io::TensorView* view_;
  std::optional<io::DType> cast_;  // empty where it would change no value
};

/// Stored floating-point values -> T, exactly (float64 -> float rounds to nearest even). `from` may be unaligned.
/// @throws std::logic_error for a type of integers
void widen_values(io::DType dtype, std::int64_t count, const void* from, float* to);
void widen_values(io::DType dtype, std::int64_t count, const void* from, double* to);
/// T -> stored values with one rounding to nearest even; NaN becomes the positive quiet NaN. `to` may be unaligned.
/// @return how many results are not finite
std::int64_t narrow_values(io::DType dtype, std::int64_t count, const float* from, void* to);
std::int64_t narrow_values(io::DType dtype, std::int64_t count, const double* from, void* to);

}  // namespace mergex::merging
