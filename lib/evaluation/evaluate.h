#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "evaluation/objective.h"
#include "io/json.h"
#include "statistics/metrics.h"
#include "text/t5_tokenizer.h"

namespace mergex::evaluation {

/// What the model said of one example.
struct Prediction {
  std::optional<double> gold = {};
  double predicted = 0.0;        ///< class index or score
  std::vector<float> logits = {};
  // Of a model that generates its answer:
  std::string text = {};
  bool is_parsable = true;  ///< where it is not, `predicted` is -1
};

struct SplitResult {
  std::string name = {};
  std::int64_t num_scored = 0;   ///< labelled examples (text: target tokens)
  double loss = 0.0;             ///< mean over what is scored
  std::vector<statistics::Score> scores = {};
  std::optional<std::string> collapsed = {};  ///< set when a constant predictor produced the scores
  std::optional<std::int64_t> unparsable = {};  ///< generated answers among the scored that name no class or number
  std::vector<Prediction> predictions = {};   ///< one per example, labelled or not

  /// "loss" or one of the metrics; NaN where it is undefined. @throws std::logic_error for a name that was not asked for
  double value(const std::string& metric) const;
  /// name, n, loss, metrics by name (null where undefined), unparsable, collapsed
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

/// Scores a split whose answers the model writes: greedy generation, up to the length of the longest target there can
/// be, turned back into a class or a score. An answer that names no class is wrong, and for `f1` the wrong one of two
/// classes; one that is no number is scored as -1. The loss is the mean over the gold answers' tokens.
/// Source: Raffel et al. 2020, section 2.4 (arXiv:1910.10683); f1 as in the T5 repository.
SplitResult evaluate_generated(backbones::Backbone& model, const Objective& objective, tasks::Kind kind,
                               const std::string& name, const std::vector<tasks::Encoded>& examples,
                               const std::vector<std::string>& metrics, const std::vector<std::string>& labels,
                               std::int64_t batch_size, const text::T5Tokenizer& tokenizer);

/// Mean loss of a text-to-text split. @param make_batch  batch of these examples
SplitResult evaluate_loss(backbones::Backbone& model, const Objective& objective, const std::string& name,
                          std::span<const std::size_t> order, std::int64_t batch_size,
                          const std::function<Batch(std::span<const std::size_t> examples)>& make_batch);

}  // namespace mergex::evaluation
