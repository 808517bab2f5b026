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

/// What lies between the lowest and the highest of several runs at `x`.
struct BandPoint {
  double x = 0.0, low = 0.0, high = 0.0;
};

struct Series {
  std::string name = {};
  std::vector<Point> points = {};    ///< in drawing order; one that is not finite interrupts the line
  std::vector<BandPoint> band = {};  ///< a shade behind the line, where there is one
};

struct LinePanel {
  std::string y_label = {};
  std::vector<Series> series = {};
  std::optional<ReferenceLine> reference = {};
  /// A logarithmic axis where single values would otherwise press all others flat (and all are above 0).
  bool tame_spikes = false;
};

/// Panels over one another that share their horizontal axis.
struct LinePlot {
  std::string title = {};
  std::string x_label = {};
  std::vector<LinePanel> panels = {};
  std::string note = {};  ///< small, below
};

/// Lines in the colours of Okabe and Ito (2008), dashed once these are used up. Each line's name stands at its right
/// end, moved up or down where names would overlap, so that names are in the order of the last values. Series that
/// appear in several panels should have the same place in each: it decides the colour.
std::string line_plot(const LinePlot& plot);

}  // namespace mergex::statistics
