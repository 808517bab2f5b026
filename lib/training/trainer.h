#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "nn/forward_context.h"
#include "routing/expert_layer.h"
#include "training/early_stopping.h"
#include "training/optimizer.h"
#include "training/parameter_groups.h"
#include "training/schedule.h"

namespace mergex::training {

/// The recipe's `training` and `evaluation` sections.
struct TrainingOptions {
  std::int64_t epochs = 0;     ///< used where max_steps is 0
  std::int64_t max_steps = 0;
  std::int64_t batch_size = 16;             ///< examples of one forward pass
  std::int64_t gradient_accumulation = 1;   ///< forward passes of one optimiser step
  OptimizerOptions optimizer;
  std::vector<ParameterGroup> parameter_groups;
  Schedule schedule;
  double max_grad_norm = 1.0;  ///< 0: no clipping
  at::ScalarType precision = at::kFloat;  ///< of matrix products; float32: the model's own dtype
  bool activation_checkpointing = false;  ///< compute blocks again in the backward pass instead of keeping activations
  bool length_bucketing = false;          ///< examples of a step, and of an evaluation's batch, are of similar length
  std::optional<double> average_decay;    ///< of the moving average of weights that is evaluated and kept
  std::int64_t log_every = 10, save_every = 0, keep_checkpoints = 1;
  bool tensorboard = false;  ///< write event files; for the caller, who gives Run::observe

  std::int64_t evaluate_every = 0;  ///< steps; 0: every epoch
  std::int64_t evaluation_batch_size = 32;
  std::string select_best_by;       ///< a metric of the task, or "loss"; empty: the task's own
  std::optional<EarlyStopping> early_stopping;

  std::string training_origin, evaluation_origin;  ///< where the two sections stand, for messages

  static TrainingOptions read(io::JsonObject training, io::JsonObject evaluation);
  std::int64_t steps_per_epoch(std::int64_t num_examples) const;
  std::int64_t num_steps(std::int64_t num_examples) const;
};

/// What one evaluation gave: numbers for metrics.jsonl and the one that selects the best checkpoint.
struct Evaluation {
  io::Json metrics = {};
  double selected = 0.0;
};

/// Everything that the loop does not know: the model, the data and what to measure.
struct Run {
  std::filesystem::path folder;
  std::int64_t num_examples = 0;
  std::vector<std::int64_t> lengths;  ///< of the examples, for length_bucketing
  std::uint64_t seed = 0;
  bool higher_is_better = true;
  std::vector<std::pair<std::string, Tensor>> parameters;
  routing::ExpertSet* experts = nullptr;  ///< null for a dense model
  tensor::RandomStreams* random = nullptr;
  /// Number of scored units (sentences, target tokens) in these examples of this epoch, before any forward pass; with
  /// class weights the sum of theirs.
  std::function<double(std::span<const std::size_t> examples, std::int64_t epoch)> count_units;
  /// Sum of the loss over the units of these examples, weighted in the same way.
  std::function<Tensor(std::span<const std::size_t> examples, std::int64_t epoch, nn::ForwardContext&)> loss_sum;
  std::function<Evaluation()> evaluate;
  std::function<void(const std::filesystem::path& folder)> write_model;
  std::function<void(const std::filesystem::path& folder)> read_model;
  /// Each line of metrics.jsonl as it is written, with `examples_per_s` beside the training loss; may be empty.
  std::function<void(const io::Json& line)> observe;
  std::function<std::string()> memory;  ///< for the progress line; may be empty
};

struct TrainingResult {
  std::int64_t steps = 0, best_step = 0;
  double best = 0.0, last = 0.0;
  bool stopped_early = false;
};

/// Trains, evaluates, keeps checkpoints; continues from the newest checkpoint of the folder when there is one.
/// Afterwards the model holds the best checkpoint's weights.
/// @throws GuardError when a loss or gradient is not finite; Interrupted after the state was saved
TrainingResult train(const TrainingOptions& options, Run& run);

}  // namespace mergex::training
