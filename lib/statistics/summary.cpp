#include "statistics/summary.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "statistics/sum.h"

namespace mergex::statistics {

Summary summarize(std::span<const double> values) {
  if (values.empty()) throw std::invalid_argument("summarize: no values");
  if (!std::ranges::all_of(values, [](double value) { return std::isfinite(value); })) {
    throw std::invalid_argument("summarize: a value is not finite");
  }
  const double n = static_cast<double>(values.size());
  // Distances from the first value: equal values have exactly that mean and no deviation, whatever their size.
  const double origin = values.front();
  Sum sum;
  for (const double value : values) sum.add(value - origin);
  const double offset = sum.total() / n;
  Summary summary{.n = values.size(), .mean = origin + offset};
  if (values.size() < 2) return summary;
  Sum squares;
  for (const double value : values) squares.add((value - origin - offset) * (value - origin - offset));
  summary.deviation = std::sqrt(squares.total() / (n - 1.0));
  return summary;
}

}  // namespace mergex::statistics
