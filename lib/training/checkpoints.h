#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "io/json.h"
#include "tensor/tensor.h"

namespace mergex::training {

/// The part of a run that is no model: written as training_state.safetensors + training_state.json.
struct TrainingState {
  std::map<std::string, Tensor> tensors;  ///< optimiser moments, random streams
  io::Json values;
};

/// `checkpoints/` of a run folder. A checkpoint is written to a temporary name, synced and renamed, so that each one
/// that is there is whole; `best` (a link) moves after that, and old ones go last.
class CheckpointFolders {
 public:
  explicit CheckpointFolders(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// @param write_model  writes the model's files into the folder that it is given
  void save(std::int64_t step, const TrainingState& state,
            const std::function<void(const std::filesystem::path&)>& write_model);
  /// As `save`, for a run that was asked to stop between two checkpoints: gone once the next regular one is there.
  void save_interrupted(std::int64_t step, const TrainingState& state,
                        const std::function<void(const std::filesystem::path&)>& write_model);

  /// The newest whole checkpoint. Leftovers of a killed write are removed.
  std::optional<std::filesystem::path> newest();
  TrainingState load_state(const std::filesystem::path& checkpoint) const;

  /// Makes `best` a link to the checkpoint of this step.
  void point_best(std::int64_t step);
  std::filesystem::path best() const { return folder_ / "best"; }
  /// Removes all but the last `keep` and `best_step`, of which an older one keeps its weights alone.
  void prune(std::int64_t keep, std::int64_t best_step);

 private:
  void write(const std::filesystem::path& name, const TrainingState& state,
             const std::function<void(const std::filesystem::path&)>& write_model);
  std::map<std::int64_t, std::filesystem::path> regular() const;

  std::filesystem::path folder_;
};

}  // namespace mergex::training
