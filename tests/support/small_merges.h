#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "merging/plan.h"
#include "support/checkpoints.h"

namespace mergex::test {

/// Methods that exist for tests alone, each with another way through the passes.
extern const merging::Method kMean;       ///< (base + inputs) / count; no pass
extern const merging::Method kCentered;   ///< first input - its mean + share of positive values; sums, then counts
extern const merging::Method kRowScaled;  ///< first input / mean magnitude of its row; whole rows
extern const merging::Method kGlobal;     ///< first input / root of the sum of squares over all tensors of the model

/// What a small merge is made of: a base and two models with every kind of tensor: several units long, many small ones,
/// 16, 32 and 64 bits, integers, a scalar, an empty one, and one that is copied.
struct SmallMerge {
  std::filesystem::path folder;
  std::size_t input_shards = 1;
  std::int64_t long_tensor = 700'001;
  int num_small = 40;

  void make_inputs() const;
  /// Opens the inputs.
  merging::MergePlan plan() const;
};

/// Values that a tensor of the plan must have, by its definition, in double.
std::vector<double> expected_values(const merging::MergePlan& plan, const merging::PlannedTensor& tensor);

/// All files of a result but timing.json, by name.
std::map<std::string, std::string> comparable_content(const std::filesystem::path& folder);

}  // namespace mergex::test
