#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "evaluation/objective.h"
#include "io/json.h"
#include "statistics/metrics.h"

namespace mergex::evaluation {

/// What the model said of one example.
struct Prediction {
  std::optional<double> gold = {};
  double predicted = 0.0;        ///< class index or score
  std::vector<float> logits = {};
};

struct SplitResult {
  std::string name = {};
  std::int64_t num_scored = 0;   ///< labelled examples (text: target tokens)
  double loss = 0.0;             ///< mean over what is scored
  std::vector<statistics::Score> scores = {};
  std::optional<std::string> collapsed = {};  ///< set when a constant predictor produced the scores
  std::vector<Prediction> predictions = {};   ///< one per example, labelled or not

  /// "loss" or one of the metrics; NaN where it is undefined. @throws std::logic_error for a name that was not asked for
  double value(const std::string& metric) const;
  /// name, n, loss, metrics by name (null where undefined), collapsed
  io::Json to_json() const;
};

/// The order in which examples are put into batches: as they stand, or the longest first.
std::vector<std::size_t> batch_order(const std::vector<tasks::Encoded>& examples, bool by_length);

/// Scores a split of classes or of numbers; rows without a label are predicted and not scored.
/// @param order  of the examples in batches; predictions are in the examples' own
SplitResult evaluate_split(backbones::Backbone& model, const Objective& objective, tasks::Kind kind,
                           const std::string& name, const std::vector<tasks::Encoded>& examples,
                           std::span<const std::size_t> order, const std::vector<std::string>& metrics,
                           const std::vector<std::string>& labels, std::int64_t batch_size);

/// Mean loss of a text-to-text split. @param make_batch  batch of these examples
SplitResult evaluate_loss(backbones::Backbone& model, const Objective& objective, const std::string& name,
                          std::span<const std::size_t> order, std::int64_t batch_size,
                          const std::function<Batch(std::span<const std::size_t> examples)>& make_batch);

}  // namespace mergex::evaluation
