#include "statistics/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>

#include "statistics/summary.h"
#include "statistics/table.h"
#include "statistics/utf8.h"

namespace mergex::statistics {
namespace {

constexpr double kPageWidth = 800.0, kMargin = 24.0;
constexpr double kTitleSize = 17.0, kTextSize = 13.0, kSmallSize = 11.5;
constexpr std::string_view kInk = "#1a1a1a", kQuiet = "#5c5c5c", kGrid = "#e4e4e4", kAxis = "#8a8a8a";

// Okabe and Ito 2008, without the yellow that a white page swallows.
constexpr std::array<std::string_view, 7> kPalette{"#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                                   "#E69F00", "#56B4E9", "#000000"};
constexpr std::array<std::string_view, 4> kDashes{"", "7 3", "2 3", "9 3 2 3"};

// Beyond this, squares of deviations are not numbers any more.
bool drawable(double value) { return std::abs(value) < 1e150; }

/// A coordinate: two decimals, no trailing zeros.
std::string at(double value) {
  auto text = *number(value, 2);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.ends_with('.')) text.pop_back();
  return text;
}

/// Width of a text in pixels, estimated from the widths of Helvetica's letters (in 1/1000 of the size) with room for
/// the somewhat wider fonts that stand in for it.
double text_width(std::string_view text, double size) {
  constexpr std::array<short, 95> kAscii{
      278, 278, 355, 556, 556, 889, 667, 191, 333, 333, 389, 584, 278, 333, 278, 278,   // space to /
      556, 556, 556, 556, 556, 556, 556, 556, 556, 556, 278, 278, 584, 584, 584, 556,   // 0 to ?
      1015, 667, 667, 722, 722, 667, 611, 778, 722, 278, 500, 667, 556, 833, 722, 778,  // @ to O
      667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 278, 278, 278, 469, 556,   // P to _
      333, 556, 556, 500, 556, 556, 278, 556, 556, 222, 222, 500, 222, 833, 556, 556,   // ` to o
      556, 556, 333, 500, 278, 556, 500, 722, 500, 500, 500, 334, 260, 334, 584};       // p to ~
  double width = 0.0;
  while (!text.empty()) {
    const auto [value, bytes] = first_code_point(text);
    text.remove_prefix(bytes.size());
    width += value >= 0x20 && value < 0x7F ? kAscii[value - 0x20] : value < 0x2E80 ? 620 : 1000;
  }
  return 1.1 * size * width / 1000.0;
}

/// 1.50e9, with the digits given.
std::string scientific(double value, int digits) {
  auto text = fmt::format("{:.{}e}", value, digits);
  const auto exponent = text.find('e') + 1;  // "+09", "-07"
  if (text[exponent + 1] == '0') text.erase(exponent + 1, 1);
  if (text[exponent] == '+') text.erase(exponent, 1);
  return text;
}

/// The text, or as much of its beginning as fits, with "…".
std::string cut(std::string_view text, double size, double width) {
  if (text_width(text, size) <= width) return std::string(text);
  std::string kept;
  while (!text.empty()) {
    const auto bytes = first_code_point(text).bytes;
    if (text_width(kept + std::string(bytes) + "…", size) > width) break;
    kept += bytes;
    text.remove_prefix(bytes.size());
  }
  return kept + "…";
}

/// Broken at spaces into at most `max_lines` lines, the last one cut.
std::vector<std::string> wrap(std::string_view text, double size, double width, std::size_t max_lines) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    std::size_t end = text.size();
    while (lines.size() + 1 < max_lines && end != std::string_view::npos &&
           text_width(text.substr(0, end), size) > width) {
      end = end == 0 ? std::string_view::npos : text.rfind(' ', end - 1);
    }
    if (end == std::string_view::npos || end == 0) end = text.size();
    lines.push_back(cut(text.substr(0, end), size, width));
    text.remove_prefix(end);
    while (text.starts_with(' ')) text.remove_prefix(1);
  }
  return lines;
}

struct TextStyle {
  std::string_view anchor = "start";
  double size = kTextSize;
  std::string_view colour = kInk;
  bool bold = false;
  double rotation = 0.0;
  std::string_view whole = {};  ///< shown under the pointer where the text was cut
};

struct LineStyle {
  std::string_view colour = kInk;
  double width = 1.0;
  std::string_view dash = {};
};

/// An SVG document that grows element by element.
class Svg {
 public:
  void line(double x1, double y1, double x2, double y2, const LineStyle& style) {
    body_ += fmt::format("<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\"{}/>\n", at(x1), at(y1), at(x2), at(y2),
                         stroke(style));
  }

  void polyline(const std::vector<Point>& points, const LineStyle& style) {
    std::string coordinates;
    for (const auto& point : points) {
      coordinates += fmt::format("{}{},{}", coordinates.empty() ? "" : " ", at(point.x), at(point.y));
    }
    body_ += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke-linejoin=\"round\"{}/>\n", coordinates,
                         stroke(style));
  }

  void polygon(const std::vector<Point>& corners, std::string_view colour, double opacity) {
    std::string coordinates;
    for (const auto& point : corners) {
      coordinates += fmt::format("{}{},{}", coordinates.empty() ? "" : " ", at(point.x), at(point.y));
    }
    body_ += fmt::format("<polygon points=\"{}\" fill=\"{}\" fill-opacity=\"{}\"/>\n", coordinates, colour,
                         at(opacity));
  }

  void circle(double x, double y, double radius, std::string_view colour, double opacity = 1.0) {
    body_ += fmt::format("<circle cx=\"{}\" cy=\"{}\" r=\"{}\" fill=\"{}\"", at(x), at(y), at(radius), colour);
    if (opacity < 1.0) body_ += fmt::format(" fill-opacity=\"{}\"", at(opacity));
    body_ += "/>\n";
  }

  void text(double x, double y, std::string_view content, const TextStyle& style) {
    body_ += fmt::format("<text x=\"{}\" y=\"{}\" font-size=\"{}\" fill=\"{}\"", at(x), at(y), at(style.size),
                         style.colour);
    if (style.anchor != "start") body_ += fmt::format(" text-anchor=\"{}\"", style.anchor);
    if (style.bold) body_ += " font-weight=\"bold\"";
    if (style.rotation != 0.0) {
      body_ += fmt::format(" transform=\"rotate({} {} {})\"", at(style.rotation), at(x), at(y));
    }
    body_ += '>';
    if (!style.whole.empty() && style.whole != content) body_ += "<title>" + escape_xml(style.whole) + "</title>";
    body_ += escape_xml(content) + "</text>\n";
  }

  /// The title's lines, from the top margin. @return the height they take
  double heading(std::string_view title) {
    const auto lines = wrap(title, kTitleSize, kPageWidth - 2 * kMargin, 3);
    double y = kMargin;
    for (const auto& title_line : lines) {
      y += kTitleSize;
      text(kMargin, y, title_line, {.size = kTitleSize, .bold = true, .whole = lines.size() == 3 ? title : title_line});
      y += 6.0;
    }
    return y;
  }

  std::string document(double height, std::string_view title) const {
    return fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" role=\"img\" "
        "font-family=\"Helvetica, Arial, 'Liberation Sans', sans-serif\">\n<title>{2}</title>\n"
        "<rect width=\"{0}\" height=\"{1}\" fill=\"#ffffff\"/>\n{3}</svg>\n",
        at(kPageWidth), at(height), escape_xml(title), body_);
  }

 private:
  static std::string stroke(const LineStyle& style) {
    auto attributes = fmt::format(" stroke=\"{}\" stroke-width=\"{}\"", style.colour, at(style.width));
    if (!style.dash.empty()) attributes += fmt::format(" stroke-dasharray=\"{}\"", style.dash);
    return attributes;
  }

  std::string body_;
};

/// The smallest and largest of what was drawn; empty at first.
struct Extent {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();

  void include(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  /// With some air at both ends, and never without width; 0 ... 1 where nothing was included.
  Extent padded(double fraction) const {
    if (low > high) return {0.0, 1.0};
    const double magnitude = std::max(std::abs(low), std::abs(high));
    // Values that are equal to nine digits would need ticks that no reader can tell apart.
    const double width = high - low;
    if (magnitude < 1e-150) return {-1.0, 1.0};
    const double pad = width > 1e-9 * magnitude ? fraction * width : 0.05 * magnitude;
    return {low - pad, high + pad};
  }
};

struct Tick {
  double value = 0.0;
  std::string label;
};

/// Multiples of 1, 2 or 5 times a power of ten inside the extent, at most about `target` of them.
std::vector<Tick> ticks(const Extent& extent, double target, bool whole_numbers) {
  const double rough = (extent.high - extent.low) / target;
  int exponent = static_cast<int>(std::floor(std::log10(rough)));
  const auto step_of = [](double leading, int power) { return leading * std::pow(10.0, power); };
  double leading = 1.0;
  while (step_of(leading, exponent) < rough * (1.0 - 1e-9)) {
    leading = leading == 1.0 ? 2.0 : leading == 2.0 ? 5.0 : 10.0;
    if (leading == 10.0) break;
  }
  if (leading == 10.0) {
    leading = 1.0;
    ++exponent;
  }
  if (whole_numbers && exponent < 0) {
    leading = 1.0;
    exponent = 0;
  }
  const double step = step_of(leading, exponent);
  const double largest = std::max(std::abs(extent.low), std::abs(extent.high));
  const bool with_exponent = largest >= 1e7 || step < 1e-6;
  std::vector<Tick> result;
  for (double k = std::ceil(extent.low / step - 1e-9); k <= std::floor(extent.high / step + 1e-9); ++k) {
    // A quotient by a whole power of ten rounds once: 3 / 10 is 0.3, 3 * 0.1 is not.
    const double value = exponent < 0 ? k * leading / std::pow(10.0, -exponent) : k * step;
    auto label = *number(value, std::max(0, -exponent));
    if (with_exponent) {
      const int digits = static_cast<int>(std::floor(std::log10(largest))) - exponent;
      label = value == 0.0 ? "0" : scientific(value, std::clamp(digits, 0, 15));
    }
    result.push_back({value, label});
  }
  return result;
}

double widest(const std::vector<Tick>& all) {
  double width = 0.0;
  for (const auto& tick : all) width = std::max(width, text_width(tick.label, kTextSize));
  return width;
}

/// Ticks of a horizontal axis: as many as their labels have room for.
std::vector<Tick> horizontal_ticks(const Extent& extent, double width, bool whole_numbers) {
  std::vector<Tick> result;
  for (double target = 10.0; target >= 1.0; target -= 1.0) {
    result = ticks(extent, target, whole_numbers);
    if (static_cast<double>(result.size()) * (widest(result) + 16.0) <= width) break;
  }
  return result;
}

/// From values to pixels.
struct Scale {
  Extent extent;
  double from = 0.0, to = 0.0;

  double operator()(double value) const {
    return from + (value - extent.low) / (extent.high - extent.low) * (to - from);
  }
};

void draw_horizontal_axis(Svg& svg, const Scale& x, const std::vector<Tick>& all, double y, std::string_view label) {
  svg.line(x.from, y, x.to, y, {.colour = kAxis});
  for (const auto& tick : all) {
    svg.line(x(tick.value), y, x(tick.value), y + 5.0, {.colour = kAxis});
    svg.text(x(tick.value), y + 20.0, tick.label, {.anchor = "middle"});
  }
  const double room = 2.0 * std::min(0.5 * (x.from + x.to), kPageWidth - 0.5 * (x.from + x.to)) - 2.0 * kMargin;
  svg.text(0.5 * (x.from + x.to), y + 42.0, cut(label, kTextSize, room), {.anchor = "middle", .whole = label});
}

/// The finite values of a row and what is written beside it.
struct DrawnRow {
  std::vector<double> values;
  std::optional<Summary> summary;
  std::string text;
};

DrawnRow drawn(const DotRow& row, int digits) {
  DrawnRow result;
  std::ranges::copy_if(row.values, std::back_inserter(result.values), drawable);
  if (result.values.empty()) {
    result.text = row.values.empty() ? "no value" : "no finite value";
    return result;
  }
  result.summary = summarize(result.values);
  const auto shown = [&](double value) {
    return std::abs(value) < 1e7 ? *number(value, digits) : scientific(value, 3);
  };
  result.text = shown(result.summary->mean);
  if (result.summary->deviation) result.text += " ± " + shown(*result.summary->deviation);
  if (result.values.size() != row.values.size()) {
    result.text += fmt::format(" ({} of {})", result.values.size(), row.values.size());
  } else {
    result.text += fmt::format(" ({})", row.values.size());
  }
  return result;
}

}  // namespace

std::string dot_plot(const DotPlot& plot) {
  constexpr std::string_view kColour = kPalette[0], kReferenceColour = kPalette[1];
  constexpr double kGap = 14.0;
  const double row_height = plot.rows.size() <= 12 ? 38.0 : plot.rows.size() <= 24 ? 30.0 : 26.0;

  std::vector<DrawnRow> rows;
  Extent extent;
  bool has_deviation = false;
  double label_width = 0.0, value_width = 0.0;
  for (const auto& row : plot.rows) {
    const auto& added = rows.emplace_back(drawn(row, plot.digits));
    for (const double value : added.values) extent.include(value);
    if (added.summary && added.summary->deviation) {
      has_deviation = true;
      extent.include(added.summary->mean - *added.summary->deviation);
      extent.include(added.summary->mean + *added.summary->deviation);
    }
    label_width = std::max(label_width, text_width(row.label, kTextSize));
    value_width = std::max(value_width, text_width(added.text, kTextSize));
  }
  const std::string_view value_header = has_deviation ? "mean ± s.d. (seeds)" : "value (seeds)";
  value_width = std::max(value_width, text_width(value_header, kSmallSize));
  label_width = std::min(label_width, 280.0);
  const bool has_reference = plot.reference && drawable(plot.reference->value);
  if (has_reference) extent.include(plot.reference->value);

  Svg svg;
  const double title_end = svg.heading(plot.title);
  const Scale x{.extent = extent.padded(0.06),
                .from = kMargin + label_width + kGap,
                .to = kPageWidth - kMargin - value_width - kGap};
  const double top = title_end + 36.0;
  const double bottom = top + row_height * static_cast<double>(std::max<std::size_t>(rows.size(), 1)) + 4.0;

  const auto axis_ticks = horizontal_ticks(x.extent, x.to - x.from, false);
  for (const auto& tick : axis_ticks) svg.line(x(tick.value), top, x(tick.value), bottom, {.colour = kGrid});
  svg.text(kPageWidth - kMargin, top - 10.0, value_header, {.anchor = "end", .size = kSmallSize, .colour = kQuiet});
  if (has_reference) {
    const double line_x = x(plot.reference->value);
    svg.line(line_x, top - 4.0, line_x, bottom, {.colour = kReferenceColour, .width = 1.5, .dash = "5 4"});
    const auto label = cut(plot.reference->label, kSmallSize, x.to - x.from);
    const double half = 0.5 * text_width(label, kSmallSize);
    svg.text(std::clamp(line_x, x.from + half, x.to - half), top - 10.0, label,
             {.anchor = "middle", .size = kSmallSize, .colour = "#A84A00", .whole = plot.reference->label});
  }

  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& row = rows[i];
    const double y = top + (static_cast<double>(i) + 0.5) * row_height;
    const auto& label = plot.rows[i].label;
    svg.text(x.from - kGap, y + 4.5, cut(label, kTextSize, label_width), {.anchor = "end", .whole = label});
    svg.text(kPageWidth - kMargin, y + 4.5, row.text, {.anchor = "end", .colour = row.summary ? kInk : kQuiet});
    svg.line(x.from, y, x.to, y, {.colour = kGrid, .dash = "1 3"});
    if (!row.summary) continue;
    // The seeds lie a little below the bar, which would cover them.
    if (row.values.size() > 1) {
      for (const double value : row.values) svg.circle(x(value), y + 0.25 * row_height, 2.6, kColour, 0.4);
    }
    const double mean = row.summary->mean;
    if (row.summary->deviation) {
      const double left = x(mean - *row.summary->deviation), right = x(mean + *row.summary->deviation);
      svg.line(left, y, right, y, {.colour = kColour, .width = 2.0});
      for (const double end : {left, right}) svg.line(end, y - 4.0, end, y + 4.0, {.colour = kColour, .width = 2.0});
    }
    svg.circle(x(mean), y, 5.0, kColour);
  }

  draw_horizontal_axis(svg, x, axis_ticks, bottom, plot.axis_label);
  svg.text(kMargin, bottom + 70.0,
           has_deviation
               ? "Large dot: mean. Bar: one sample standard deviation to either side. Small dots: single seeds."
               : "Dots: one seed per row, so there is no deviation to show.",
           {.size = kSmallSize, .colour = kQuiet});
  return svg.document(bottom + 70.0 + 18.0, plot.title);
}

namespace {

LineStyle series_style(std::size_t index, std::size_t num_series) {
  return {.colour = kPalette[index % kPalette.size()],
          .width = num_series > 8 ? 1.6 : 2.0,
          .dash = kDashes[index / kPalette.size() % kDashes.size()]};
}

/// Multiples of 1, 2 and 5 of powers of ten (of powers alone where there are many), at their logarithms.
std::vector<Tick> logarithmic_ticks(const Extent& logs) {
  const bool powers_only = logs.high - logs.low > 4.0;
  const double every = std::max(1.0, std::ceil((logs.high - logs.low) / 8.0));
  std::vector<Tick> result;
  for (double exponent = std::floor(logs.low); exponent <= logs.high; exponent += powers_only ? every : 1.0) {
    for (const double leading : {1.0, 2.0, 5.0}) {
      if (powers_only && leading > 1.0) continue;
      const double at = exponent + std::log10(leading);
      if (at < logs.low || at > logs.high) continue;
      const double value = leading * std::pow(10.0, exponent);
      const bool plain = exponent >= -4.0 && exponent < 6.0;
      result.push_back({at, plain ? fmt::format("{:.6g}", value) : scientific(value, 0)});
    }
  }
  return result;
}

/// Vertical places of labels, each as near to where it belongs as a line's distance from its neighbours allows.
/// @param wanted  y by label; those that belong nowhere come last  @return y by label
std::vector<double> spread_labels(const std::vector<double>& wanted, double top, double bottom, double distance) {
  std::vector<std::size_t> order(wanted.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return wanted[i]; });
  std::vector<double> places(wanted.size());
  double free = top + 0.5 * distance;
  for (const auto i : order) {
    places[i] = std::max(wanted[i], free);
    free = places[i] + distance;
  }
  double limit = bottom - 0.5 * distance;
  for (auto at = order.rbegin(); at != order.rend(); ++at) {
    places[*at] = std::min(places[*at], limit);
    limit = places[*at] - distance;
  }
  return places;
}

/// A panel's values on its own vertical axis, logarithms where that one is logarithmic.
struct PreparedPanel {
  std::vector<Series> series;
  std::vector<std::string> remarks;  // after each series' name
  std::optional<double> reference;
  Extent y_extent;
  std::vector<Tick> y_ticks;
  double height = 0.0;
};

constexpr double kNameDistance = 16.0;

PreparedPanel prepare(const LinePanel& panel, double height, Extent& x_extent, bool& whole_x) {
  PreparedPanel p;
  p.series = panel.series;
  p.height = std::max(height, kNameDistance * static_cast<double>(p.series.size()));
  std::vector<double> values;
  for (const auto& series : p.series) {
    const auto num_before = values.size();
    for (const auto& point : series.points) {
      if (!drawable(point.x) || !drawable(point.y)) continue;
      x_extent.include(point.x);
      whole_x = whole_x && point.x == std::floor(point.x);
      values.push_back(point.y);
    }
    p.remarks.push_back(values.size() > num_before ? "" : " (no finite value)");
    for (const auto& band : series.band) {
      if (drawable(band.low) && drawable(band.high)) values.insert(values.end(), {band.low, band.high});
    }
  }
  if (panel.reference && drawable(panel.reference->value)) p.reference = panel.reference->value;

  std::ranges::sort(values);
  const bool logarithmic =
      panel.tame_spikes && !values.empty() && values.front() > 0.0 && values.back() > 8.0 * values[values.size() / 2];
  if (logarithmic) {
    const auto log = [](double& value) { value = drawable(value) ? std::log10(value) : value; };
    for (auto& series : p.series) {
      for (auto& point : series.points) log(point.y);
      for (auto& band : series.band) {
        log(band.low);
        log(band.high);
      }
    }
    for (auto& value : values) log(value);
    if (p.reference) p.reference = *p.reference > 0.0 ? std::optional(std::log10(*p.reference)) : std::nullopt;
  }
  Extent extent;
  for (const double value : values) extent.include(value);
  if (p.reference) extent.include(*p.reference);
  p.y_extent = extent.padded(0.06);
  p.y_ticks = logarithmic ? logarithmic_ticks(p.y_extent) : ticks(p.y_extent, p.height / 36.0, false);
  return p;
}

/// Calls `finish` with each stretch of points that a line connects, in pixels.
template <class Values, class Drawable, class Place, class Finish>
void for_each_stretch(const Values& values, Drawable is_drawable, Place place, Finish finish) {
  decltype(std::vector{place(values.front())}) stretch;
  for (const auto& value : values) {
    if (is_drawable(value)) {
      stretch.push_back(place(value));
      continue;
    }
    if (!stretch.empty()) finish(stretch);
    stretch.clear();
  }
  if (!stretch.empty()) finish(stretch);
}

void draw_series(Svg& svg, const Series& series, const LineStyle& style, const Scale& x, const Scale& y, bool crowded) {
  if (series.points.empty()) return;
  const bool with_dots = series.points.size() <= 25;
  for_each_stretch(
      series.points, [](const Point& p) { return drawable(p.x) && drawable(p.y); },
      [&](const Point& p) { return Point{x(p.x), y(p.y)}; },
      [&](const std::vector<Point>& stretch) {
        if (stretch.size() > 1) svg.polyline(stretch, style);
        if (!with_dots && stretch.size() > 1) return;
        for (const auto& point : stretch) svg.circle(point.x, point.y, crowded ? 2.0 : 2.8, style.colour);
      });
}

void draw_band(Svg& svg, const Series& series, std::string_view colour, const Scale& x, const Scale& y) {
  if (series.band.empty()) return;
  for_each_stretch(
      series.band, [](const BandPoint& b) { return drawable(b.x) && drawable(b.low) && drawable(b.high); },
      [&](const BandPoint& b) { return BandPoint{x(b.x), y(b.low), y(b.high)}; },
      [&](const std::vector<BandPoint>& stretch) {
        std::vector<Point> outline;
        for (const auto& b : stretch) outline.push_back({b.x, b.high});
        for (auto b = stretch.rbegin(); b != stretch.rend(); ++b) outline.push_back({b->x, b->low});
        svg.polygon(outline, colour, 0.13);
      });
}

}  // namespace

std::string line_plot(const LinePlot& plot) {
  constexpr double kSample = 24.0, kLeader = 20.0, kBetween = 34.0;
  Extent x_extent;
  bool whole_x = true, has_names = false;
  std::vector<PreparedPanel> panels;
  double tick_width = 0.0, name_width = 0.0;
  bool has_y_label = false;
  for (const auto& panel : plot.panels) {
    const auto& p = panels.emplace_back(prepare(panel, plot.panels.size() == 1 ? 320.0 : 236.0, x_extent, whole_x));
    tick_width = std::max(tick_width, widest(p.y_ticks));
    has_y_label = has_y_label || !panel.y_label.empty();
    for (std::size_t i = 0; i < p.series.size(); ++i) {
      if (panel.series[i].name.empty()) continue;
      has_names = true;
      name_width = std::max(name_width, text_width(panel.series[i].name + p.remarks[i], kSmallSize));
    }
  }
  name_width = std::min(name_width + 1.0, 220.0);  // a sum of widths may round to less than the whole's

  Svg svg;
  double top = svg.heading(plot.title) + 16.0;
  const Scale x{.extent = x_extent.padded(0.02),
                .from = kMargin + (has_y_label ? 26.0 : 0.0) + tick_width + 10.0,
                .to = kPageWidth - kMargin - (has_names ? kLeader + kSample + 6.0 + name_width : 0.0)};
  const auto x_ticks = horizontal_ticks(x.extent, x.to - x.from, whole_x);

  for (std::size_t n = 0; n < panels.size(); ++n) {
    const auto& p = panels[n];
    const auto& panel = plot.panels[n];
    const double bottom = top + p.height;
    const Scale y{.extent = p.y_extent, .from = bottom, .to = top};
    for (const auto& tick : p.y_ticks) {
      svg.line(x.from, y(tick.value), x.to, y(tick.value), {.colour = kGrid});
      svg.text(x.from - 8.0, y(tick.value) + 4.5, tick.label, {.anchor = "end"});
    }
    svg.line(x.from, top, x.from, bottom, {.colour = kAxis});
    if (n + 1 == panels.size()) {
      draw_horizontal_axis(svg, x, x_ticks, bottom, plot.x_label);
    } else {
      svg.line(x.from, bottom, x.to, bottom, {.colour = kAxis});
      for (const auto& tick : x_ticks) svg.line(x(tick.value), bottom, x(tick.value), bottom + 5.0, {.colour = kAxis});
    }
    if (!panel.y_label.empty()) {
      svg.text(kMargin + 12.0, 0.5 * (top + bottom), cut(panel.y_label, kTextSize, bottom - top),
               {.anchor = "middle", .rotation = -90.0, .whole = panel.y_label});
    }
    if (p.reference) {
      svg.line(x.from, y(*p.reference), x.to, y(*p.reference), {.colour = kQuiet, .width = 1.2, .dash = "5 4"});
      svg.text(x.to - 4.0, y(*p.reference) - 5.0, cut(panel.reference->label, kSmallSize, x.to - x.from),
               {.anchor = "end", .size = kSmallSize, .colour = kQuiet, .whole = panel.reference->label});
    }

    const bool crowded = p.series.size() > 8;
    std::vector<double> wanted;
    std::vector<std::optional<Point>> ends;
    for (std::size_t i = 0; i < p.series.size(); ++i) {
      draw_band(svg, p.series[i], series_style(i, p.series.size()).colour, x, y);
    }
    for (std::size_t i = 0; i < p.series.size(); ++i) {
      draw_series(svg, p.series[i], series_style(i, p.series.size()), x, y, crowded);
      std::optional<Point> end;
      for (const auto& point : p.series[i].points) {
        if (drawable(point.x) && drawable(point.y)) end = {x(point.x), y(point.y)};
      }
      ends.push_back(end);
      wanted.push_back(end ? end->y : bottom);
    }
    if (std::ranges::none_of(ends, [](const auto& end) { return end.has_value(); })) {
      svg.text(0.5 * (x.from + x.to), 0.5 * (top + bottom), "no finite value", {.anchor = "middle", .colour = kQuiet});
    }
    const auto places = spread_labels(wanted, top - 0.5 * kNameDistance, bottom + 0.5 * kNameDistance, kNameDistance);
    for (std::size_t i = 0; i < p.series.size(); ++i) {
      if (panel.series[i].name.empty()) continue;
      const auto style = series_style(i, p.series.size());
      const double sample_x = x.to + kLeader;
      if (ends[i]) {
        svg.line(ends[i]->x, ends[i]->y, sample_x, places[i], {.colour = style.colour, .width = 0.6});
      }
      svg.line(sample_x, places[i], sample_x + kSample, places[i], style);
      const auto& name = panel.series[i].name;
      svg.text(sample_x + kSample + 6.0, places[i] + 4.0,
               cut(name, kSmallSize, name_width - text_width(p.remarks[i], kSmallSize)) + p.remarks[i],
               {.size = kSmallSize, .whole = name + p.remarks[i]});
    }
    top = bottom + kBetween;
  }
  double height = top - kBetween + 64.0;
  if (!plot.note.empty()) {
    svg.text(kMargin, height, plot.note, {.size = kSmallSize, .colour = kQuiet});
    height += 18.0;
  }
  return svg.document(height, plot.title);
}

}  // namespace mergex::statistics
