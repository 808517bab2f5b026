#include "statistics/metrics.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <set>
#include <stdexcept>
#include <vector>

#include "core/random.h"
#include "io/json.h"
#include "statistics/registry.h"
#include "support/catch.h"
#include "support/paths.h"

using namespace mergex;
using namespace mergex::statistics;
using io::Json;

namespace {

using Ints = std::vector<int>;
using Doubles = std::vector<double>;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// The golden file writes a number that is not one as a string.
double golden_number(const Json& value) { return value.is_string() ? kNan : value.get<double>(); }

// Relative; absolute below 1, where the reference may be 0. NaN equals NaN.
double error_of(double value, double reference) {
  if (std::isnan(value) && std::isnan(reference)) return 0.0;
  if (std::isnan(value) || std::isnan(reference)) return std::numeric_limits<double>::infinity();
  return std::abs(value - reference) / (reference == 0.0 ? 1.0 : std::abs(reference));
}

struct Compared {
  std::string field;
  double value = 0.0;
};

void check_case(const std::string& kind, const Json& golden_case, const std::vector<Compared>& fields) {
  const auto id = "statistics/" + kind + "/" + golden_case.at("name").get<std::string>();
  double largest = 0.0;
  for (const auto& [field, value] : fields) {
    const double reference = golden_number(golden_case.at(field));
    INFO(id << " " << field << ": got " << fmt::format("{:.17g}", value) << ", reference "
            << fmt::format("{:.17g}", reference));
    const double error = error_of(value, reference);
    CHECK(error <= 1e-12);
    largest = std::max(largest, error);
  }
  test::log_golden(id, largest <= 1e-12 ? fmt::format("ok, largest error {:.1g}", largest)
                                        : fmt::format("FAILED, largest error {:.1g}", largest));
}

Ints random_classes(std::size_t n, std::uint64_t num_classes, std::uint64_t seed) {
  SplitMix64 random(seed);
  Ints classes(n);
  for (int& label : classes) label = static_cast<int>(random.below(num_classes));
  return classes;
}

Doubles random_scores(std::size_t n, std::uint64_t seed) {
  SplitMix64 random(seed);
  Doubles scores(n);
  for (double& score : scores) score = 2.0 * random.uniform() - 1.0;
  return scores;
}

template <class T>
std::vector<T> reordered(const std::vector<T>& values, const std::vector<std::size_t>& order) {
  std::vector<T> result;
  for (const std::size_t i : order) result.push_back(values[i]);
  return result;
}

}  // namespace

TEST_CASE("classification metrics equal scikit-learn's", "[statistics][golden]") {
  const auto file = test::golden_file("statistics.json");
  REQUIRE(file);
  const auto cases = io::read_json(*file).at("classification").at("cases");
  REQUIRE_FALSE(cases.empty());
  for (const auto& golden_case : cases) {
    const auto gold = golden_case.at("truth").get<Ints>(), predicted = golden_case.at("pred").get<Ints>();
    std::vector<Compared> fields{
        {"accuracy", accuracy(gold, predicted)},
        {"micro_f1", accuracy(gold, predicted)},  // the same number where every example has one class
        {"macro_f1_all_classes", macro_f1(gold, predicted, golden_case.at("classes").get<int>())},
        {"macro_f1_seen_classes", macro_f1(gold, predicted)},
        {"weighted_f1", weighted_f1(gold, predicted)},
        {"matthews", matthews(gold, predicted)}};
    if (golden_case.contains("binary_f1")) {
      fields.push_back({"binary_f1", f1(gold, predicted)});
      fields.push_back({"precision", precision(gold, predicted)});
      fields.push_back({"recall", recall(gold, predicted)});
    }
    check_case("classification", golden_case, fields);
  }
}

TEST_CASE("correlations equal scipy's", "[statistics][golden]") {
  const auto file = test::golden_file("statistics.json");
  REQUIRE(file);
  const auto cases = io::read_json(*file).at("correlation").at("cases");
  REQUIRE_FALSE(cases.empty());
  for (const auto& golden_case : cases) {
    const auto x = golden_case.at("x").get<Doubles>(), y = golden_case.at("y").get<Doubles>();
    check_case("correlation", golden_case, {{"pearson", pearson(x, y)}, {"spearman", spearman(x, y)}});
    CHECK(score(kPearson, x, y).defined == !std::isnan(golden_number(golden_case.at("pearson"))));
    CHECK(score(kSpearman, x, y).defined == !std::isnan(golden_number(golden_case.at("spearman"))));
  }
}

// Expected values of google-research/text-to-text-transfer-transformer, t5/evaluation/metrics_test.py, as fractions.
TEST_CASE("metrics equal the T5 repository's expectations", "[statistics][golden]") {
  const auto check = [](const std::string& name, double value, double reference) {
    INFO(name);
    // Its percentages are given to four decimals.
    CHECK(std::abs(value - reference) <= 1e-6);
    test::log_golden("statistics/t5/" + name, fmt::format("ok, error {:.1g}", std::abs(value - reference)));
  };
  check("accuracy", accuracy(Ints{0, 0, 2, 1}, Ints{0, 1, 2, 1}), 0.75);
  check("matthews", matthews(Ints{0, 0, 2, 1}, Ints{0, 1, 2, 1}), 0.70);
  check("mean_multiclass_f1", macro_f1(Ints{0, 1, 1, 2}, Ints{0, 0, 2, 2}, 3), 0.444444);
  check("f1_with_invalid", f1_with_invalid(Ints{0, 1, 1, 0}, Ints{0, 1, 2, 2}), 0.50);
  check("pearson", pearson(Doubles{0, 2}, Doubles{0, 1}), 1.0);
  check("spearman", spearman(Doubles{0, 2, 1}, Doubles{0, 1, 2}), 0.5);
}

TEST_CASE("the order of the examples changes no metric", "[statistics][law]") {
  const auto seed = GENERATE(1u, 2u, 3u);
  const std::size_t n = GENERATE(std::size_t{2}, std::size_t{7}, std::size_t{100});
  const auto order = random_permutation(n, seed + 50);
  const auto gold = random_classes(n, 4, seed), predicted = random_classes(n, 4, seed + 10);
  const auto x = random_scores(n, seed), y = random_scores(n, seed + 10);
  for (const Metric* metric : metrics()) {
    INFO(metric->name);
    if (metric->of_classes != nullptr && metric != &kF1WithInvalid) {
      const auto once = score(*metric, gold, predicted);
      const auto again = score(*metric, reordered(gold, order), reordered(predicted, order));
      CHECK(once.value == again.value);
      CHECK(once.defined == again.defined);
    }
    if (metric->of_scores != nullptr) {
      const double once = score(*metric, x, y).value;
      CHECK(error_of(score(*metric, reordered(x, order), reordered(y, order)).value, once) < 1e-12);
    }
  }
}

TEST_CASE("Matthews does not care which class is which, nor which side is gold", "[statistics][law]") {
  const auto seed = GENERATE(1u, 2u, 3u, 4u);
  const int num_classes = GENERATE(2, 3, 7);
  const auto gold = random_classes(60, static_cast<std::uint64_t>(num_classes), seed);
  auto predicted = gold;
  const auto noise = random_classes(60, static_cast<std::uint64_t>(num_classes), seed + 10);
  for (std::size_t i = 0; i < 30; ++i) predicted[i] = noise[i];
  const auto renamed = [&](Ints labels) {
    for (int& label : labels) label = num_classes - 1 - label;
    return labels;
  };
  const double value = matthews(gold, predicted);
  CHECK(value > 0.0);
  CHECK(matthews(predicted, gold) == value);
  CHECK(matthews(renamed(gold), renamed(predicted)) == value);
  CHECK(matthews(gold, gold) == 1.0);
  if (num_classes == 2) CHECK(matthews(gold, renamed(predicted)) == -value);
}

TEST_CASE("Pearson is invariant under affine maps, Spearman under monotone ones", "[statistics][law]") {
  const auto seed = GENERATE(1u, 2u, 3u);
  const std::size_t n = GENERATE(std::size_t{3}, std::size_t{20}, std::size_t{501});
  const auto x = random_scores(n, seed), y = random_scores(n, seed + 10);
  const auto mapped = [](Doubles values, auto map) {
    for (double& value : values) value = map(value);
    return values;
  };
  const double r = pearson(x, y), rho = spearman(x, y);
  CHECK(std::abs(r) <= 1.0);
  CHECK(error_of(pearson(y, x), r) < 1e-14);
  CHECK(error_of(pearson(mapped(x, [](double v) { return 3.0 * v + 5.0; }), y), r) < 1e-11);
  CHECK(error_of(pearson(mapped(x, [](double v) { return -0.25 * v; }), y), -r) < 1e-13);
  const auto huge = mapped(x, [](double v) { return 1e200 * v; });
  const auto tiny = mapped(y, [](double v) { return 1e-200 * v; });
  CHECK(error_of(pearson(huge, tiny), r) < 1e-12);
  CHECK(spearman(mapped(x, [](double v) { return std::exp(5.0 * v); }), y) == rho);
  CHECK(spearman(x, mapped(y, [](double v) { return v * v * v; })) == rho);
  CHECK(spearman(mapped(x, [](double v) { return -v; }), y) == Approx(-rho).epsilon(1e-12));
  CHECK(spearman(x, mapped(x, [](double v) { return std::atan(v); })) == 1.0);
}

TEST_CASE("ties share their mean rank", "[statistics]") {
  // Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
  CHECK(spearman(Doubles{1, 2, 2, 3}, Doubles{1, 2, 3, 4}) == Approx(4.5 / std::sqrt(4.5 * 5.0)).epsilon(1e-14));
  CHECK(spearman(Doubles{0.0, -0.0, 1.0}, Doubles{5, 5, 7}) == 1.0);
}

TEST_CASE("a large common offset does not eat the correlation", "[statistics]") {
  const Doubles x{1e9 + 1, 1e9 + 2, 1e9 + 3, 1e9 + 4}, y{2, 1, 4, 3};
  CHECK(pearson(x, y) == Approx(0.6).epsilon(1e-13));
}

TEST_CASE("constant predictors are undefined, and said to have collapsed", "[statistics]") {
  const Ints gold{0, 1, 1, 0}, ones{1, 1, 1, 1};
  const auto of_constant = score(kMatthews, gold, ones);
  CHECK(of_constant.metric == "matthews");
  CHECK(of_constant.value == 0.0);
  CHECK_FALSE(of_constant.defined);
  CHECK_FALSE(score(kMatthews, ones, gold).defined);
  CHECK(score(kAccuracy, gold, ones).defined);
  CHECK(score(kMatthews, gold, gold).defined);

  const Doubles scores{1, 2, 3}, equal{0.1, 0.1, 0.1};
  for (const Metric* metric : {&kPearson, &kSpearman}) {
    CHECK_FALSE(score(*metric, scores, equal).defined);
    CHECK(std::isnan(score(*metric, scores, equal).value));
    CHECK_FALSE(score(*metric, equal, scores).defined);
  }

  const std::vector<std::string> names{"entailment", "not_entailment"};
  CHECK(collapse(Ints(277, 0), names) == "collapsed: all 277 predictions are \"entailment\"");
  CHECK(collapse(ones) == "collapsed: all 4 predictions are class 1");
  CHECK(collapse(Ints{5, 5}, names) == "collapsed: all 2 predictions are class 5");
  CHECK(collapse(Ints{-1, -1, -1}, names) == "collapsed: none of the 3 predictions names a class");
  CHECK(collapse(gold, names) == std::nullopt);
  CHECK(collapse(Doubles(1500, 2.5)) == "collapsed: all 1500 predictions are 2.5");
  CHECK(collapse(Doubles{2.7131, 2.7131 + 2e-7, 2.7131}) == "collapsed: all 3 predictions are 2.7131");
  CHECK(collapse(Doubles{0.0, 0.0}) == "collapsed: all 2 predictions are 0");
  CHECK(collapse(Doubles{2.71, 2.72}) == std::nullopt);
  CHECK(collapse(Doubles{-1e308, 1e308}) == std::nullopt);
}

TEST_CASE("0/0 counts as 0 and is flagged", "[statistics]") {
  const Ints zeros{0, 0, 0}, some{0, 1, 0};
  CHECK(f1(zeros, zeros) == 0.0);
  CHECK_FALSE(score(kF1, zeros, zeros).defined);
  CHECK(score(kF1, some, zeros).defined);
  CHECK_FALSE(score(kPrecision, some, zeros).defined);
  CHECK_FALSE(score(kRecall, zeros, some).defined);
  CHECK(macro_f1(Ints{0, 0}, Ints{-1, 0}) == Approx(2.0 / 3.0));
}

TEST_CASE("an invalid answer is never better than a wrong one", "[statistics][law]") {
  const auto seed = GENERATE(1u, 2u, 3u);
  const auto gold = random_classes(40, 2, seed);
  auto predicted = random_classes(40, 2, seed + 10), wrong = predicted;
  for (std::size_t i = 0; i < 10; ++i) {
    predicted[i] = -1;
    wrong[i] = 1 - gold[i];
  }
  CHECK(f1_with_invalid(gold, predicted) == f1(gold, wrong));
  CHECK(f1_with_invalid(gold, wrong) == f1(gold, wrong));
}

TEST_CASE("none, one and two examples", "[statistics]") {
  CHECK(test::user_error([] { accuracy(Ints{}, Ints{}); }) == "accuracy: no example to score; the split is empty");
  CHECK(test::user_error([] { spearman(Doubles{}, Doubles{}); }) ==
        "spearman: no example to score; the split is empty");
  CHECK(accuracy(Ints{1}, Ints{1}) == 1.0);
  CHECK(f1(Ints{1}, Ints{1}) == 1.0);
  CHECK_FALSE(score(kMatthews, Ints{1}, Ints{1}).defined);
  CHECK_FALSE(score(kPearson, Doubles{1}, Doubles{1}).defined);
  CHECK(matthews(Ints{0, 1}, Ints{1, 0}) == -1.0);
  CHECK(pearson(Doubles{1, 2}, Doubles{7, 3}) == -1.0);
  CHECK(spearman(Doubles{1, 2}, Doubles{3, 7}) == 1.0);
  CHECK(collapse(Ints{}) == std::nullopt);
  CHECK(collapse(Ints{3}) == std::nullopt);
  CHECK(collapse(Doubles{3.0}) == std::nullopt);
}

TEST_CASE("what cannot be scored is refused", "[statistics]") {
  CHECK(test::user_error([] { pearson(Doubles{1, 2, 3}, Doubles{1, kNan, 3}); }) ==
        "pearson: prediction 2 of 3 is nan, expected a finite number");
  CHECK(test::user_error([] { spearman(Doubles{1, 2}, Doubles{1, std::numeric_limits<double>::infinity()}); }) ==
        "spearman: prediction 2 of 2 is inf, expected a finite number");
  CHECK(test::user_error([] { collapse(Doubles{kNan, kNan}); }) ==
        "collapse: prediction 1 of 2 is nan, expected a finite number");
  // E16: a test split carries -1 for every label.
  CHECK(test::user_error([] { accuracy(Ints{1, -1}, Ints{1, 1}); }) ==
        "accuracy: gold label 2 of 2 is -1, expected 0 or more; score a split that has labels");
  CHECK(test::user_error([] { f1_with_invalid(Ints{1, 2}, Ints{1, 1}); }) ==
        "f1_with_invalid: gold label 2 of 2 is 2, expected 0 or 1");
  CHECK_THROWS_AS(accuracy(Ints{1, 2}, Ints{1}), std::invalid_argument);
  CHECK_THROWS_AS(score(kPearson, Ints{1, 2}, Ints{1, 2}), std::invalid_argument);
  CHECK_THROWS_AS(score(kLoss, Doubles{1}, Doubles{1}), std::invalid_argument);
}

TEST_CASE("metrics: every entry is named, explained and runs", "[statistics]") {
  std::set<std::string_view> names;
  for (const Metric* metric : metrics()) {
    INFO(metric->name);
    CHECK(names.insert(metric->name).second);
    CHECK(metric->name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == std::string_view::npos);
    CHECK_FALSE(metric->name.empty());
    CHECK_FALSE(metric->summary.empty());
    CHECK_FALSE(metric->source.empty());
    CHECK((metric->of_classes != nullptr) == (metric->kind == MetricKind::classes));
    CHECK((metric->of_scores != nullptr) == (metric->kind == MetricKind::scores));
    CHECK(&find_metric(metric->name) == metric);
    // All that can be computed here are best at a perfect prediction, where they are 1.
    if (metric->of_classes != nullptr) CHECK(score(*metric, Ints{0, 1, 1}, Ints{0, 1, 1}).value == 1.0);
    if (metric->of_scores != nullptr) CHECK(score(*metric, Doubles{0, 1, 5}, Doubles{0, 1, 5}).value == 1.0);
    CHECK(metric->higher_is_better == (metric->kind != MetricKind::reported));
  }
  CHECK_FALSE(find_metric("loss").higher_is_better);
}

TEST_CASE("an unknown metric is answered with the nearest one", "[statistics]") {
  CHECK(test::user_error([] { find_metric("acuracy", "r.json#/evaluation/select_best_by"); }) ==
        "r.json#/evaluation/select_best_by: got \"acuracy\", no such metric; did you mean \"accuracy\"?");
  CHECK(test::user_error([] { find_metric("zzzzzzzzzz"); })
            .starts_with("got \"zzzzzzzzzz\", no such metric; expected \"accuracy\", "));
}
