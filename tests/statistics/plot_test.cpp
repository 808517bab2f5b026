#include "statistics/plot.h"

#include <fmt/format.h>

#include <limits>
#include <string_view>
#include <vector>

#include "statistics/utf8.h"
#include "support/catch.h"

using namespace mergex::statistics;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::size_t count(std::string_view text, std::string_view part) {
  std::size_t n = 0;
  for (auto at = text.find(part); at != std::string_view::npos; at = text.find(part, at + part.size())) ++n;
  return n;
}

// Enough of XML to find what breaks a document: tags that nest, quoted attributes given once, no stray markup.
void check_well_formed(std::string_view text) {
  REQUIRE(text.starts_with("<svg "));
  REQUIRE(text.ends_with("</svg>\n"));
  std::vector<std::string> open;
  std::size_t roots = 0;
  while (!text.empty()) {
    const auto tag = text.find('<');
    const auto content = text.substr(0, tag);
    REQUIRE(content.find('>') == std::string_view::npos);
    for (auto amp = content.find('&'); amp != std::string_view::npos; amp = content.find('&', amp + 1)) {
      const auto name = content.substr(amp, content.find(';', amp) - amp);
      REQUIRE((name == "&amp" || name == "&lt" || name == "&gt" || name == "&quot"));
    }
    if (tag == std::string_view::npos) break;
    const auto end = text.find('>', tag);
    REQUIRE(end != std::string_view::npos);
    auto inside = text.substr(tag + 1, end - tag - 1);
    text.remove_prefix(end + 1);
    if (inside.starts_with('/')) {
      REQUIRE_FALSE(open.empty());
      REQUIRE(open.back() == inside.substr(1));
      open.pop_back();
      continue;
    }
    const bool closed = inside.ends_with('/');
    if (closed) inside.remove_suffix(1);
    roots += open.empty() ? 1 : 0;
    if (!closed) open.emplace_back(inside.substr(0, inside.find(' ')));
    REQUIRE(count(inside, "\"") == 2 * count(inside, "=\""));
    REQUIRE(inside.find("nan") == std::string_view::npos);
    REQUIRE(inside.find("inf") == std::string_view::npos);
  }
  REQUIRE(open.empty());
  REQUIRE(roots == 1);
}

DotPlot small_dots() {
  return {.title = "RTE",
          .axis_label = "accuracy",
          .rows = {{"dense", {0.6, 0.7}}, {"camex <ties> & co", {0.8}}, {"diverged", {kNan, kInfinity}}},
          .reference = ReferenceLine{0.5, "majority class 0.50"}};
}

LinePlot small_lines() {
  return {.title = "Loss",
          .x_label = "epoch",
          .panels = {{.y_label = "loss",
                      .series = {{"dense", {{1, 3}, {2, 2}, {3, 1}}, {{1, 2.5, 3.5}, {2, 2, 2}, {3, 1, 1.5}}},
                                 {"camex", {{1, 2}, {2, kNan}, {3, 1}}},
                                 {"none", {{1, kNan}}}}}}};
}

}  // namespace

TEST_CASE("a dot plot shows means, deviations, seeds and what is missing", "[statistics]") {
  const auto svg = dot_plot(small_dots());
  check_well_formed(svg);
  CHECK(svg == dot_plot(small_dots()));
  CHECK(count(svg, "r=\"5\"") == 2);    // means
  CHECK(count(svg, "r=\"2.6\"") == 2);  // seeds, of the row that has several
  CHECK(count(svg, ">0.65 ± 0.07 (2)</text>") == 1);
  CHECK(count(svg, ">0.80 (1)</text>") == 1);
  CHECK(count(svg, ">no finite value</text>") == 1);
  CHECK(count(svg, ">camex &lt;ties&gt; &amp; co</text>") == 1);
  CHECK(count(svg, ">majority class 0.50</text>") == 1);
  CHECK(count(svg, ">accuracy</text>") == 1);
  for (const auto tick : {">0.50<", ">0.55<", ">0.60<", ">0.65<", ">0.70<", ">0.75<", ">0.80<"}) {
    CHECK(count(svg, tick) == 1);
  }
}

TEST_CASE("a line plot interrupts its lines where a value is missing", "[statistics]") {
  const auto svg = line_plot(small_lines());
  check_well_formed(svg);
  CHECK(svg == line_plot(small_lines()));
  CHECK(count(svg, "<polyline") == 1);          // the other series is two single points
  CHECK(count(svg, "<circle") == 3 + 2);
  CHECK(count(svg, "<polygon") == 1);  // the band of the first series
  CHECK(count(svg, ">none (no finite value)</text>") == 1);
  for (const auto tick : {">1</text>", ">2</text>", ">3</text>"}) CHECK(count(svg, tick) == 1);
  CHECK(count(svg, ">1.5</text>") == 1);  // on the y axis only: epochs are whole numbers
}

TEST_CASE("plots of awkward content stay well formed", "[statistics]") {
  const auto num_rows = GENERATE(0, 1, 2, 13, 40);
  using Values = std::vector<double>;
  const auto values = GENERATE(Values{}, Values{kNan}, Values{0.0}, Values{5.0, 5.0}, Values{1e-12, 3e-12},
                               Values{-1e12, 1e12, kNan}, Values{1.0, 1.0 + 1e-15}, Values{-1e308, 1e308},
                               Values{5e-324}, Values{1e149, -1e149});
  DotPlot dots{.title = std::string(400, 'W'), .axis_label = std::string(300, 'x')};
  LinePlot lines{.title = "a title of many words, as many as it takes to fill more than the three lines that it may "
                          "have, which is a good deal more than anybody should write above a plot, and still more, "
                          "and more, and more, until it is cut at last somewhere in the middle of this sentence",
                 .panels = {{.y_label = std::string(200, 'y')}, {.tame_spikes = true}},
                 .note = "a note"};
  for (int i = 0; i < num_rows; ++i) {
    dots.rows.push_back({fmt::format("row {} \x01 \xFF \"<&>\" {}", i, std::string(120, 'm')), values});
    Series series{.name = dots.rows.back().label};
    for (const double value : values) {
      series.points.push_back({value, value});
      series.band.push_back({value, value, 2.0 * value});
    }
    for (auto& panel : lines.panels) panel.series.push_back(series);
  }
  check_well_formed(dot_plot(dots));
  dots.reference = ReferenceLine{kNan, "nowhere"};
  check_well_formed(dot_plot(dots));
  dots.reference = ReferenceLine{-7.0, std::string(200, 'r')};
  check_well_formed(dot_plot(dots));
  check_well_formed(line_plot(lines));
  lines.panels[0].reference = ReferenceLine{kInfinity, "nowhere"};
  lines.panels[1].reference = ReferenceLine{-7.0, std::string(200, 'r')};
  check_well_formed(line_plot(lines));
  lines.panels.clear();
  check_well_formed(line_plot(lines));
}

TEST_CASE("names at the ends of lines keep their order and their distance", "[statistics]") {
  LinePlot plot{.panels = {{}}};
  for (int i = 0; i < 30; ++i) {  // all end in nearly the same place, the later the higher
    plot.panels[0].series.push_back({.name = fmt::format("row-{:02}", i), .points = {{0, 0}, {1, 1 + 1e-3 * i}}});
  }
  const auto svg = line_plot(plot);
  double above = 1e9;
  for (int i = 0; i < 30; ++i) {
    const auto end = svg.find(fmt::format(">row-{:02}<", i));
    REQUIRE(end != std::string::npos);
    const auto begin = svg.rfind(" y=\"", end) + 4;
    const double y = std::stod(svg.substr(begin));
    CHECK(y <= above - 15.99);
    above = y;
  }
}

TEST_CASE("a spike turns the axis logarithmic, where that was asked for", "[statistics]") {
  LinePanel panel{.series = {{"", {{1, 0.7}, {2, 0.6}, {3, 900.0}, {4, 0.5}}}}, .tame_spikes = true};
  CHECK(count(line_plot({.panels = {panel}}), ">100</text>") == 1);
  CHECK(count(line_plot({.panels = {panel}}), ">1</text>") == 1 + 1);  // of the x axis, too
  panel.tame_spikes = false;
  CHECK(count(line_plot({.panels = {panel}}), ">200</text>") == 1);
  panel.tame_spikes = true;
  panel.series[0].points.push_back({5, 0.0});  // has no logarithm
  CHECK(count(line_plot({.panels = {panel}}), ">200</text>") == 1);
}

TEST_CASE("the axis of a small plot has round numbers", "[statistics]") {
  const auto svg = dot_plot({.title = "t", .axis_label = "a", .rows = {{"r", {0.0, 1.0}}}});
  // Mean 0.5, deviation 0.7071: from -0.207 to 1.207 and some air.
  for (const auto tick : {"-0.2", "0.0", "0.2", "0.4", "0.6", "0.8", "1.0", "1.2"}) {
    CHECK(count(svg, fmt::format(">{}</text>", tick)) == 1);
  }
}

TEST_CASE("a line plot, byte for byte", "[statistics]") {
  const auto svg = line_plot({.title = "t", .panels = {{.series = {{"", {{0, 0}, {1, 1}}}}}}});
  CHECK(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"800\" height=\"447\" "
                        "viewBox=\"0 0 800 447\" role=\"img\" "
                        "font-family=\"Helvetica, Arial, 'Liberation Sans', sans-serif\">\n<title>t</title>\n"
                        "<rect width=\"800\" height=\"447\" fill=\"#ffffff\"/>\n"));
  // The frame is 53.88 ... 776 by 383 ... 63; the data leave 2 % of their width and 6 % of their height free.
  CHECK(svg.find("<polyline points=\"67.76,365.86 762.11,80.14\" fill=\"none\" stroke-linejoin=\"round\" "
                 "stroke=\"#0072B2\" stroke-width=\"2\"/>\n") != std::string::npos);
  CHECK(svg.find("<circle cx=\"67.76\" cy=\"365.86\" r=\"2.8\" fill=\"#0072B2\"/>\n") != std::string::npos);
}
