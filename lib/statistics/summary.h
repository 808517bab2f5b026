#pragma once

#include <cstddef>
#include <optional>
#include <span>

namespace mergex::statistics {

/// The same number from repeated runs.
struct Summary {
  std::size_t n = 0;
  double mean = 0.0;
  std::optional<double> deviation = {};  ///< sample standard deviation (n - 1); one run has none
};

/// @throws std::invalid_argument when there is no value or one is not finite (leave undefined scores out, and say so)
Summary summarize(std::span<const double> values);

}  // namespace mergex::statistics
