#include "statistics/registry.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/suggest.h"

namespace mergex::statistics {
namespace {

constexpr std::array kMetrics{&kAccuracy, &kF1,       &kMatthews,  &kPearson,      &kSpearman, &kMacroF1,
                              &kRecall,   &kPrecision, &kWeightedF1, &kF1WithInvalid, &kLoss};

}  // namespace

std::span<const Metric* const> metrics() { return kMetrics; }

const Metric& find_metric(std::string_view name, std::string_view where) {
  const auto found = std::ranges::find(kMetrics, name, [](const Metric* metric) { return metric->name; });
  if (found != kMetrics.end()) return **found;
  std::vector<std::string> names;
  for (const Metric* metric : kMetrics) names.emplace_back(metric->name);
  auto hint = did_you_mean(name, names);
  if (hint.empty()) hint = "; expected " + quoted_list(names);
  fail("{}{}got \"{}\", no such metric{}", where, where.empty() ? "" : ": ", name, hint);
}

}  // namespace mergex::statistics
