#pragma once

#include <optional>
#include <string>
#include <vector>

namespace mergex::statistics {

// Plots are self-contained SVG documents on a white page, the same bytes for the same content. Values that are not
// finite are left out of the drawing and said in words. Texts may hold anything; too long ones are cut with "…" (the
// whole text shows when the pointer rests on it).

/// One row of a dot plot: a method, a task.
struct DotRow {
  std::string label = {};
  std::vector<double> values = {};  ///< one per seed
};

struct ReferenceLine {
  double value = 0.0;
  std::string label = {};  ///< "majority class 0.50"
};

struct DotPlot {
  std::string title = {};
  std::string axis_label = {};
  std::vector<DotRow> rows = {};
  std::optional<ReferenceLine> reference = {};
  int digits = 2;  ///< of the values at the right
};

/// Horizontal rows: the mean, a bar of one sample standard deviation to either side, the single seeds as faint dots,
/// and the numbers at the right.
std::string dot_plot(const DotPlot& plot);

struct Point {
  double x = 0.0;
  double y = 0.0;
};

struct Series {
  std::string name = {};
  std::vector<Point> points = {};  ///< in drawing order; one that is not finite interrupts the line
};

struct LinePlot {
  std::string title = {};
  std::string x_label = {};
  std::string y_label = {};
  std::vector<Series> series = {};
};

/// Lines over a common pair of axes, in the colours of Okabe and Ito (2008); dashed once the colours are used up.
std::string line_plot(const LinePlot& plot);

}  // namespace mergex::statistics
