#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace mergex::statistics {

// All metrics: gold and predicted have one entry per example, computed in float64.
// @throws UserError when there is no example, a gold label is negative (a split without labels) or a score is not
// finite; std::invalid_argument when the lengths differ. A predicted class of -1 is an answer that names no class.

/// Share of examples whose class is right, in [0, 1].
double accuracy(std::span<const int> gold, std::span<const int> predicted);

/// Precision, recall and F1 of class 1; 0/0 is 0 (scikit-learn with zero_division=0).
double precision(std::span<const int> gold, std::span<const int> predicted);
double recall(std::span<const int> gold, std::span<const int> predicted);
double f1(std::span<const int> gold, std::span<const int> predicted);

/// F1 of class 1 in which a prediction outside {0, 1} counts as the wrong one of the two, so that an invalid answer
/// is never better than a wrong one. Gold must be 0 or 1.
/// Source: Raffel et al. 2020, the T5 repository's f1_score_with_invalid.
double f1_with_invalid(std::span<const int> gold, std::span<const int> predicted);

/// Unweighted mean of every class's F1 over the classes that occur in gold or predicted (-1 is not a class).
double macro_f1(std::span<const int> gold, std::span<const int> predicted);
/// The same over classes 0 ... num_classes - 1, absent ones counted as 0.
double macro_f1(std::span<const int> gold, std::span<const int> predicted, int num_classes);
/// Mean of every class's F1, weighted by how often gold has the class.
double weighted_f1(std::span<const int> gold, std::span<const int> predicted);

/// Matthews correlation for any number of classes, in [-1, 1]; 0 when gold or predicted is constant, where it is
/// undefined (score() says so). Source: Gorodkin 2004, the R_K statistic; scikit-learn's convention.
double matthews(std::span<const int> gold, std::span<const int> predicted);

/// Pearson's correlation, in [-1, 1]; NaN when either side is constant (or n < 2), where it is undefined.
double pearson(std::span<const double> gold, std::span<const double> predicted);
/// Pearson's correlation of the ranks, ties sharing their mean rank.
double spearman(std::span<const double> gold, std::span<const double> predicted);

/// A number, and whether it means anything: Matthews of a constant predictor is 0 by convention, not by measurement.
struct Measured {
  double value = 0.0;
  bool defined = true;
};

/// What a metric is computed from.
enum class MetricKind {
  classes,   ///< class indices
  scores,    ///< real numbers (regression)
  reported,  ///< neither: the model gives it (loss)
};

/// An entry of the registry.
struct Metric {
  std::string_view name = {};
  std::string_view summary = {};
  std::string_view source = {};
  MetricKind kind = MetricKind::classes;
  bool higher_is_better = true;
  Measured (*of_classes)(std::span<const int> gold, std::span<const int> predicted) = nullptr;
  Measured (*of_scores)(std::span<const double> gold, std::span<const double> predicted) = nullptr;
};

/// One reported result. An undefined one must be shown as such, never as its value.
struct Score {
  std::string metric = {};
  double value = 0.0;
  bool defined = true;
};

/// @throws std::invalid_argument when the metric is not for classes (scores)
Score score(const Metric& metric, std::span<const int> gold, std::span<const int> predicted);
Score score(const Metric& metric, std::span<const double> gold, std::span<const double> predicted);

/// Says that a classifier has collapsed to one answer: `collapsed: all 277 predictions are "entailment"`. Two or
/// more predictions are needed. @param label_names  index = class; a class without a name is shown as its number
std::optional<std::string> collapse(std::span<const int> predicted, std::span<const std::string> label_names = {});
/// The same for regression: all predictions are equal up to float32 rounding (a spread of 1e-6 of the largest).
std::optional<std::string> collapse(std::span<const double> predicted);

extern const Metric kAccuracy, kF1, kF1WithInvalid, kPrecision, kRecall, kMacroF1, kWeightedF1, kMatthews, kPearson,
    kSpearman, kLoss;

}  // namespace mergex::statistics
