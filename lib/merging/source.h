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

/// A stored floating-point tensor. @param cast  rounds every value to this type first (mergekit's `dtype`)
class StoredTensor final : public Source {
 public:
  explicit StoredTensor(const io::TensorView& view, std::optional<io::DType> cast = std::nullopt);

  void read(std::int64_t begin, std::int64_t count, float* out) const override;
  void read(std::int64_t begin, std::int64_t count, double* out) const override;
  const io::TensorView* stored() const override;

 private:
  const io::TensorView* view_;
  std::optional<io::DType> cast_;  // empty where the view has this type already
};

}  // namespace mergex::merging
