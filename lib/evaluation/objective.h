#pragma once

#include <span>
#include <vector>

#include "backbones/backbone.h"
#include "tasks/encode.h"

namespace mergex::evaluation {

/// What a model reads in one forward pass, and what it should say.
struct Batch {
  backbones::Inputs inputs;
  Tensor gold_B;        ///< classes (int64) or scores (float64) of the labelled examples; undefined for text
  Tensor labelled_B;    ///< bool; undefined where all are labelled
  double num_units = 0;  ///< labelled examples, or target tokens
};

/// How a task's examples become batches and a loss.
class Objective {
 public:
  /// @param min_length  pad sentences to this length at least (a model whose results depend on the padding)
  Objective(tasks::Kind kind, at::Device device, std::int64_t pad_id, std::int64_t min_length = 0)
      : kind_(kind), device_(device), pad_id_(pad_id), min_length_(min_length) {}

  /// Classification and regression: right padding to the longest example of the batch.
  Batch batch(std::span<const tasks::Encoded* const> examples) const;
  /// Text to text: input ids and target ids of each example.
  Batch batch(const std::vector<std::vector<std::int32_t>>& inputs,
              const std::vector<std::vector<std::int32_t>>& targets) const;

  /// Sum over the units of a batch, in float32 or wider: cross-entropy in nats, or squared error.
  Tensor loss_sum(const Batch& batch, const Tensor& logits) const;

 private:
  tasks::Kind kind_;
  at::Device device_;
  std::int64_t pad_id_, min_length_;
};

}  // namespace mergex::evaluation
