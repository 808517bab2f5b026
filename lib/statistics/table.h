#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "statistics/metrics.h"
#include "statistics/summary.h"

namespace mergex::statistics {

enum class Align { left, right, center };

struct Column {
  std::string header = {};
  Align align = Align::left;
};

/// What stands in a cell; absent: "-" where people read, nothing in CSV.
using Cell = std::optional<std::string>;

/// `86.31`; NaN and infinities as "nan", "inf", "-inf"; never "-0.00".
Cell number(double value, int digits);
Cell number(std::optional<double> value, int digits);
/// `86.31 ± 0.42`, or `86.31` where there was one run.
Cell mean_deviation(const Summary& summary, int digits);
/// The value, or "undefined".
Cell number(const Score& score, int digits);

/// Rows of cells under named columns. The renderings depend on nothing but the content.
class Table {
 public:
  explicit Table(std::vector<Column> columns);

  /// @throws std::invalid_argument when there is not one cell per column
  void add_row(std::vector<Cell> cells);

  /// GitHub's markdown, the columns padded so that it reads well as plain text too.
  std::string markdown() const;
  /// RFC 4180 quoting, header first, lines end in a line feed.
  std::string csv() const;
  /// Columns two spaces apart under a ruled header, no trailing spaces.
  std::string terminal() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

}  // namespace mergex::statistics
