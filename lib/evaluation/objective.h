#pragma once

#include <span>
#include <vector>

#include "backbones/backbone.h"
#include "io/json_object.h"
#include "tasks/encode.h"

namespace mergex::evaluation {

/// What a model reads in one forward pass, and what it should say.
struct Batch {
  backbones::Inputs inputs;
  Tensor gold_B;        ///< classes (int64) or scores (float64) of the labelled examples; undefined for text
  Tensor labelled_B;    ///< bool; undefined where all are labelled
  double num_units = 0;  ///< labelled examples, or target tokens
};

/// What shapes the loss that is trained on; an evaluation's loss is plain.
struct TrainingLoss {
  double label_smoothing = 0.0;            ///< share of a target's weight that goes to all classes alike
  std::vector<double> class_weights = {};  ///< by class; empty: all 1
  bool balanced = false;                   ///< weights are to be drawn from counts, see `balanced_weights`

  /// `label_smoothing` and `class_weights` of the `training` section.
  static TrainingLoss read(io::JsonObject& training);
};

/// Weights that give each class the same share of the loss: n / (C * n_c).
/// @param origin  of the option, for messages  @throws UserError where a class has no example
std::vector<double> balanced_weights(std::span<const tasks::Encoded> examples, std::span<const std::string> labels,
                                     const std::string& origin);

/// How a task's examples become batches and a loss.
class Objective {
 public:
  /// @param min_length  pad sentences to this length at least (a model whose results depend on the padding)
  Objective(tasks::Kind kind, at::Device device, std::int64_t pad_id, TrainingLoss training = {},
            std::int64_t min_length = 0)
      : kind_(kind), device_(device), pad_id_(pad_id), min_length_(min_length), training_(std::move(training)) {}

  /// Classification and regression: right padding to the longest example of the batch.
  Batch batch(std::span<const tasks::Encoded* const> examples) const;
  /// Text to text: the examples' ids and target ids.
  Batch text_batch(std::span<const tasks::Encoded* const> examples) const;
  /// Text to text: input ids and target ids of each example; one without target ids is not scored.
  Batch batch(const std::vector<std::vector<std::int32_t>>& inputs,
              const std::vector<std::vector<std::int32_t>>& targets) const;

  /// Sum over the units of a batch, in float32 or wider: cross-entropy in nats, or squared error.
  Tensor loss_sum(const Batch& batch, const Tensor& logits) const;
  /// The same with label smoothing and class weights: divided by the sum of the weights it is torch's `cross_entropy`.
  Tensor training_loss_sum(const Batch& batch, const Tensor& logits) const;
  /// Sum of the weights of labelled examples: their number, without class weights.
  double training_weight(std::span<const tasks::Encoded* const> examples) const;

 private:
  Tensor loss_sum(const Batch& batch, const Tensor& logits, const TrainingLoss& options) const;

  tasks::Kind kind_;
  at::Device device_;
  std::int64_t pad_id_, min_length_;
  TrainingLoss training_;
};

}  // namespace mergex::evaluation
