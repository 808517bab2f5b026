#include "statistics/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "core/error.h"
#include "statistics/sum.h"

namespace mergex::statistics {
namespace {

void check_lengths(std::string_view metric, std::size_t num_gold, std::size_t num_predicted) {
  if (num_gold != num_predicted) {
    throw std::invalid_argument(fmt::format("{}: {} gold values, {} predictions", metric, num_gold, num_predicted));
  }
  if (num_gold == 0) fail("{}: no example to score; the split is empty", metric);
}

void check(std::string_view metric, std::span<const int> gold, std::span<const int> predicted) {
  check_lengths(metric, gold.size(), predicted.size());
  if (const auto bad = std::ranges::find_if(gold, [](int label) { return label < 0; }); bad != gold.end()) {
    fail("{}: gold label {} of {} is {}, expected 0 or more; score a split that has labels", metric,
         bad - gold.begin() + 1, gold.size(), *bad);
  }
}

void check_finite(std::string_view metric, std::string_view what, std::span<const double> values) {
  const auto bad = std::ranges::find_if(values, [](double value) { return !std::isfinite(value); });
  if (bad == values.end()) return;
  fail("{}: {} {} of {} is {}, expected a finite number", metric, what, bad - values.begin() + 1, values.size(), *bad);
}

void check(std::string_view metric, std::span<const double> gold, std::span<const double> predicted) {
  check_lengths(metric, gold.size(), predicted.size());
  check_finite(metric, "gold value", gold);
  check_finite(metric, "prediction", predicted);
}

struct ClassCounts {
  double both = 0.0, gold = 0.0, predicted = 0.0;  // true positives, gold positives, predicted positives

  Measured precision() const { return {predicted > 0.0 ? both / predicted : 0.0, predicted > 0.0}; }
  Measured recall() const { return {gold > 0.0 ? both / gold : 0.0, gold > 0.0}; }
  Measured f1() const {
    const double total = gold + predicted;
    return {total > 0.0 ? 2.0 * both / total : 0.0, total > 0.0};
  }
};

std::map<int, ClassCounts> count_classes(std::span<const int> gold, std::span<const int> predicted) {
  std::map<int, ClassCounts> counts;
  for (std::size_t i = 0; i < gold.size(); ++i) {
    ++counts[gold[i]].gold;
    ++counts[predicted[i]].predicted;
    if (gold[i] == predicted[i]) ++counts[gold[i]].both;
  }
  return counts;
}

ClassCounts positives(std::span<const int> gold, std::span<const int> predicted) {
  return count_classes(gold, predicted)[1];
}

bool is_constant(std::span<const double> values) {
  return std::ranges::all_of(values, [&](double value) { return value == values.front(); });
}

// Deviations from the mean, in units of a power of two near the largest magnitude: neither 1e200 nor 1e-200 may
// overflow or vanish when squared, and the scaling itself rounds nothing.
std::vector<double> centred(std::span<const double> values) {
  double largest = 0.0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  int exponent = 0;
  std::frexp(largest, &exponent);
  std::vector<double> scaled(values.begin(), values.end());
  for (double& value : scaled) value = std::ldexp(value, -exponent);
  Sum sum;
  for (const double value : scaled) sum.add(value);
  const double mean = sum.total() / static_cast<double>(scaled.size());
  for (double& value : scaled) value -= mean;
  return scaled;
}

Measured correlate(std::span<const double> gold, std::span<const double> predicted) {
  if (is_constant(gold) || is_constant(predicted)) return {std::numeric_limits<double>::quiet_NaN(), false};
  const auto x = centred(gold), y = centred(predicted);
  Sum xx, yy, xy;
  for (std::size_t i = 0; i < x.size(); ++i) {
    xx.add(x[i] * x[i]);
    yy.add(y[i] * y[i]);
    xy.add(x[i] * y[i]);
  }
  return {std::clamp(xy.total() / std::sqrt(xx.total() * yy.total()), -1.0, 1.0), true};
}

std::vector<double> mean_ranks(std::span<const double> values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return values[i]; });
  std::vector<double> ranks(values.size());
  for (std::size_t begin = 0, end = 0; begin < order.size(); begin = end) {
    while (end < order.size() && values[order[end]] == values[order[begin]]) ++end;
    const double rank = 0.5 * static_cast<double>(begin + end + 1);  // ranks count from 1
    for (std::size_t i = begin; i < end; ++i) ranks[order[i]] = rank;
  }
  return ranks;
}

Measured measure_accuracy(std::span<const int> gold, std::span<const int> predicted) {
  check("accuracy", gold, predicted);
  std::size_t num_right = 0;
  for (std::size_t i = 0; i < gold.size(); ++i) num_right += gold[i] == predicted[i] ? 1 : 0;
  return {static_cast<double>(num_right) / static_cast<double>(gold.size()), true};
}

Measured measure_precision(std::span<const int> gold, std::span<const int> predicted) {
  check("precision", gold, predicted);
  return positives(gold, predicted).precision();
}

Measured measure_recall(std::span<const int> gold, std::span<const int> predicted) {
  check("recall", gold, predicted);
  return positives(gold, predicted).recall();
}

Measured measure_f1(std::span<const int> gold, std::span<const int> predicted) {
  check("f1", gold, predicted);
  return positives(gold, predicted).f1();
}

Measured measure_f1_with_invalid(std::span<const int> gold, std::span<const int> predicted) {
  check("f1_with_invalid", gold, predicted);
  std::vector<int> valid(predicted.begin(), predicted.end());
  for (std::size_t i = 0; i < gold.size(); ++i) {
    if (gold[i] > 1) fail("f1_with_invalid: gold label {} of {} is {}, expected 0 or 1", i + 1, gold.size(), gold[i]);
    if (valid[i] != 0 && valid[i] != 1) valid[i] = 1 - gold[i];
  }
  return positives(gold, valid).f1();
}

Measured measure_macro_f1(std::span<const int> gold, std::span<const int> predicted) {
  check("macro_f1", gold, predicted);
  Sum sum;
  std::size_t num_classes = 0;
  for (const auto& [label, counts] : count_classes(gold, predicted)) {
    if (label < 0) continue;
    sum.add(counts.f1().value);
    ++num_classes;
  }
  return {sum.total() / static_cast<double>(num_classes), true};
}

Measured measure_weighted_f1(std::span<const int> gold, std::span<const int> predicted) {
  check("weighted_f1", gold, predicted);
  Sum sum;
  for (const auto& [label, counts] : count_classes(gold, predicted)) sum.add(counts.gold * counts.f1().value);
  return {sum.total() / static_cast<double>(gold.size()), true};
}

Measured measure_matthews(std::span<const int> gold, std::span<const int> predicted) {
  check("matthews", gold, predicted);
  // Covariances of the one-hot labels, times n^2: whole numbers, exact in float64 up to 9e7 examples.
  const double n = static_cast<double>(gold.size());
  double gold_predicted = 0.0, gold_gold = n * n, predicted_predicted = n * n;
  for (const auto& [label, counts] : count_classes(gold, predicted)) {
    gold_predicted += counts.both * n - counts.gold * counts.predicted;
    gold_gold -= counts.gold * counts.gold;
    predicted_predicted -= counts.predicted * counts.predicted;
  }
  const double product = gold_gold * predicted_predicted;
  if (product <= 0.0) return {0.0, false};
  return {gold_predicted / std::sqrt(product), true};
}

Measured measure_pearson(std::span<const double> gold, std::span<const double> predicted) {
  check("pearson", gold, predicted);
  return correlate(gold, predicted);
}

Measured measure_spearman(std::span<const double> gold, std::span<const double> predicted) {
  check("spearman", gold, predicted);
  return correlate(mean_ranks(gold), mean_ranks(predicted));
}

}  // namespace

double accuracy(std::span<const int> gold, std::span<const int> predicted) {
  return measure_accuracy(gold, predicted).value;
}

double precision(std::span<const int> gold, std::span<const int> predicted) {
  return measure_precision(gold, predicted).value;
}

double recall(std::span<const int> gold, std::span<const int> predicted) {
  return measure_recall(gold, predicted).value;
}

double f1(std::span<const int> gold, std::span<const int> predicted) { return measure_f1(gold, predicted).value; }

double f1_with_invalid(std::span<const int> gold, std::span<const int> predicted) {
  return measure_f1_with_invalid(gold, predicted).value;
}

double macro_f1(std::span<const int> gold, std::span<const int> predicted) {
  return measure_macro_f1(gold, predicted).value;
}

double macro_f1(std::span<const int> gold, std::span<const int> predicted, int num_classes) {
  check("macro_f1", gold, predicted);
  if (num_classes < 1) throw std::invalid_argument(fmt::format("macro_f1: {} classes", num_classes));
  auto counts = count_classes(gold, predicted);
  Sum sum;
  for (int label = 0; label < num_classes; ++label) sum.add(counts[label].f1().value);
  return sum.total() / num_classes;
}

double weighted_f1(std::span<const int> gold, std::span<const int> predicted) {
  return measure_weighted_f1(gold, predicted).value;
}

double matthews(std::span<const int> gold, std::span<const int> predicted) {
  return measure_matthews(gold, predicted).value;
}

double pearson(std::span<const double> gold, std::span<const double> predicted) {
  return measure_pearson(gold, predicted).value;
}

double spearman(std::span<const double> gold, std::span<const double> predicted) {
  return measure_spearman(gold, predicted).value;
}

Score score(const Metric& metric, std::span<const int> gold, std::span<const int> predicted) {
  if (metric.of_classes == nullptr) throw std::invalid_argument(fmt::format("{} does not score classes", metric.name));
  const auto [value, defined] = metric.of_classes(gold, predicted);
  return {std::string(metric.name), value, defined};
}

Score score(const Metric& metric, std::span<const double> gold, std::span<const double> predicted) {
  if (metric.of_scores == nullptr) throw std::invalid_argument(fmt::format("{} does not score numbers", metric.name));
  const auto [value, defined] = metric.of_scores(gold, predicted);
  return {std::string(metric.name), value, defined};
}

std::optional<std::string> collapse(std::span<const int> predicted, std::span<const std::string> label_names) {
  if (predicted.size() < 2) return std::nullopt;
  const int label = predicted.front();
  if (std::ranges::any_of(predicted, [&](int other) { return other != label; })) return std::nullopt;
  if (label < 0) return fmt::format("collapsed: none of the {} predictions names a class", predicted.size());
  const auto index = static_cast<std::size_t>(label);
  const auto name = index < label_names.size() ? fmt::format("\"{}\"", label_names[index])
                                               : fmt::format("class {}", label);
  return fmt::format("collapsed: all {} predictions are {}", predicted.size(), name);
}

std::optional<std::string> collapse(std::span<const double> predicted) {
  if (predicted.size() < 2) return std::nullopt;
  check_finite("collapse", "prediction", predicted);
  const auto [smallest, largest] = std::ranges::minmax(predicted);
  // Halved, so that the spread of -1e308 ... 1e308 is a number too.
  const double magnitude = std::max(std::abs(smallest), std::abs(largest));
  if (0.5 * largest - 0.5 * smallest > 0.5e-6 * magnitude) return std::nullopt;
  return fmt::format("collapsed: all {} predictions are {:.6g}", predicted.size(), predicted.front());
}

constinit const Metric kAccuracy{.name = "accuracy",
                                 .summary = "share of examples whose class is right",
                                 .source = "GLUE, Wang et al. 2019, arXiv:1804.07461",
                                 .of_classes = measure_accuracy};

constinit const Metric kF1{.name = "f1",
                           .summary = "harmonic mean of precision and recall of class 1",
                           .source = "van Rijsbergen 1979, Information Retrieval, chapter 7",
                           .of_classes = measure_f1};

constinit const Metric kF1WithInvalid{.name = "f1_with_invalid",
                                      .summary = "F1 of class 1 where an answer that is no class counts as wrong",
                                      .source = "Raffel et al. 2020, arXiv:1910.10683",
                                      .of_classes = measure_f1_with_invalid};

constinit const Metric kPrecision{.name = "precision",
                                  .summary = "share of class 1 predictions that are right",
                                  .source = "van Rijsbergen 1979, Information Retrieval, chapter 7",
                                  .of_classes = measure_precision};

constinit const Metric kRecall{.name = "recall",
                               .summary = "share of class 1 examples that are found",
                               .source = "van Rijsbergen 1979, Information Retrieval, chapter 7",
                               .of_classes = measure_recall};

constinit const Metric kMacroF1{.name = "macro_f1",
                                .summary = "mean of the classes' F1, every class that occurs counted alike",
                                .source = "Yang and Liu 1999, A re-examination of text categorization methods",
                                .of_classes = measure_macro_f1};

constinit const Metric kWeightedF1{.name = "weighted_f1",
                                   .summary = "mean of the classes' F1, weighted by the class's share of the examples",
                                   .source = "scikit-learn, f1_score(average=\"weighted\")",
                                   .of_classes = measure_weighted_f1};

constinit const Metric kMatthews{.name = "matthews",
                                 .summary = "correlation of gold and predicted classes, undefined for a constant one",
                                 .source = "Matthews 1975; Gorodkin 2004 for more than two classes",
                                 .of_classes = measure_matthews};

constinit const Metric kPearson{.name = "pearson",
                                .summary = "linear correlation of gold and predicted scores",
                                .source = "Pearson 1895; GLUE, Wang et al. 2019, arXiv:1804.07461",
                                .kind = MetricKind::scores,
                                .of_scores = measure_pearson};

constinit const Metric kSpearman{.name = "spearman",
                                 .summary = "correlation of the ranks of gold and predicted scores, ties share a rank",
                                 .source = "Spearman 1904; GLUE, Wang et al. 2019, arXiv:1804.07461",
                                 .kind = MetricKind::scores,
                                 .of_scores = measure_spearman};

constinit const Metric kLoss{.name = "loss",
                             .summary = "the training objective, averaged over the examples",
                             .source = "the model",
                             .kind = MetricKind::reported,
                             .higher_is_better = false};

}  // namespace mergex::statistics
