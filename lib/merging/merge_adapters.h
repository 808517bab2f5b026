#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/adapter_folder.h"
#include "io/checkpoint_folder.h"
#include "merging/method.h"

namespace mergex::merging {

/// How adapters become one adapter. Target of every mode is the change of weights, delta_i = scaling_i B_i A_i, never the
/// factors: PEFT's `linear`, which averages A's and B's apart, adds the cross terms B_i A_j and is not offered.
struct AdapterMode {
  std::string name;
  std::string summary;
  const Method* method = nullptr;  ///< what merges the deltas before they are factored; nullptr: their weighted sum
  bool keeps_all_ranks = false;    ///< `cat`: exact, the rank of the result is the sum of the ranks
  std::span<const Parameter> parameters = {};  ///< `weight`, or the method's
};

/// "cat", "svd", and "<method>_svd" for the task-vector methods.
std::vector<AdapterMode> adapter_modes();
/// @throws UserError "<where>: got <name>, no such mode; ..."
AdapterMode find_adapter_mode(std::string_view name, std::string_view where);

struct AdapterInput {
  std::string name;  ///< as the recipe gives it; keys random masks
  std::shared_ptr<const io::AdapterFolder> adapter;
  Values parameters;  ///< those of the mode per input
};

struct MergeAdaptersOptions {
  AdapterMode mode = {};
  Values shared = {};     ///< those of the mode per tensor
  std::int64_t rank = 0;  ///< of the result, where the mode does not keep all; 0: the largest among the inputs, per module
  Dialect dialect = Dialect::kMergekit;
  std::uint64_t seed = 0;
  /// Needed where whole tensors (trained biases, modules_to_save) are to be combined otherwise than by weights that sum
  /// to 1: their change is counted from the base.
  std::shared_ptr<const io::CheckpointFolder> base = nullptr;
};

/// What became of one module.
struct MergedModule {
  std::string name;
  std::int64_t rank = 0;
  double norm = 0.0;            ///< Frobenius norm of the merged delta
  double relative_error = 0.0;  ///< of the written factors, Frobenius, by what the rank cuts off
};

/// Writes one adapter, which PEFT loads: scalings are folded in (alpha equals the rank, no rsLoRA), so its B A is the delta.
/// Modules that only some inputs have count as zero in the others. Biases of B are merged by the same rule; where one
/// input has them, all modules get some, perhaps zeros (of layers without a bias, PEFT runs these but does not merge them).
/// DoRA's change is no product of two factors: a DoRA adapter alone with weight 1 keeps its magnitudes, everything else is
/// refused. A module's deltas are in memory one module at a time (float32, one per input and one for the result; for
/// `cat` and `svd` none), the result's factors all at once.
/// The folder appears whole or not at all; the same bytes for the same inputs.
/// @throws UserError for an existing folder with content, shapes that differ, density 0, all weights 0, what the mode
///         cannot carry; std::system_error
std::vector<MergedModule> merge_adapters(std::span<const AdapterInput> inputs, const MergeAdaptersOptions& options,
                                         const std::filesystem::path& out);

}  // namespace mergex::merging
