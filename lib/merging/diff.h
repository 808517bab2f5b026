#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint_folder.h"
#include "io/json.h"

namespace mergex::merging {

/// How two checkpoints' tensors of one name differ. Numbers are of the values, computed in float64, where shapes agree.
struct TensorDifference {
  std::string name;
  std::vector<std::int64_t> shape_a = {}, shape_b = {};
  io::DType dtype_a = io::DType::kF32, dtype_b = io::DType::kF32;
  std::int64_t num_elements = 0;
  std::int64_t num_differing = 0;       ///< values that are not equal as numbers; NaN equals NaN
  std::optional<double> max_abs = {};   ///< largest |a - b|; absent where shapes differ or a difference is no number
  std::optional<double> relative = {};  ///< |a - b| / |a| by L2 norms; absent where a is 0
  std::optional<double> cosine = {};    ///< absent where either is 0

  bool has_same_shape() const { return shape_a == shape_b; }
  bool is_equal() const { return has_same_shape() && dtype_a == dtype_b && num_differing == 0; }
};

struct CheckpointDifference {
  std::vector<std::string> only_a, only_b;  ///< names
  std::vector<TensorDifference> differing;  ///< other shapes first, then by relative difference, the largest first
  std::size_t num_equal = 0;

  bool is_equal() const { return only_a.empty() && only_b.empty() && differing.empty(); }
  std::string text() const;
  io::Json json() const;
};

/// Tensors are matched by name.
CheckpointDifference diff(const io::CheckpointFolder& a, const io::CheckpointFolder& b, std::size_t num_threads);

}  // namespace mergex::merging
