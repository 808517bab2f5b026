#include "curves.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "io/atomic_file.h"
#include "statistics/plot.h"

namespace mergex::engine {
using io::Json;
using statistics::Series;

namespace {

constexpr std::size_t kMaxPoints = 100;  // of a line; more are averaged, or noise hides the lines of other rows
constexpr std::size_t kMaxBands = 6;

/// Step and value; NaN where a metric was undefined.
using Curve = std::map<std::int64_t, double>;

struct RunCurves {
  Curve training_loss, validation_loss, metric;
};

double value_or_nan(const Json& object, const std::string& key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number() ? found->get<double>() : std::numeric_limits<double>::quiet_NaN();
}

RunCurves read_curves(const ReportRow& row) {
  RunCurves curves;
  const auto file = row.folder / "metrics.jsonl";
  if (!std::filesystem::exists(file)) return curves;
  const auto metric = row.result.at("selected_by").get<std::string>();
  const auto split = row.result.at("splits").at(0).at("split").get<std::string>();
  const auto text = io::read_file(file);
  for (std::size_t begin = 0; begin < text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    const auto line = io::parse_json(text.substr(begin, end - begin), file.string());
    begin = end + 1;
    const auto step = line.at("step").get<std::int64_t>();
    if (const auto evaluation = line.find("evaluation"); evaluation != line.end()) {
      const auto found = evaluation->find(split);
      if (found == evaluation->end()) continue;
      curves.validation_loss[step] = value_or_nan(*found, "loss");
      curves.metric[step] = value_or_nan(*found, metric) * display_scale(metric);
    } else {
      curves.training_loss[step] = value_or_nan(line, "loss");
    }
  }
  return curves;
}

/// Means of `size` neighbours, each at the last one's step.
Curve averaged(const Curve& curve, std::size_t size) {
  Curve result;
  double sum = 0.0;
  std::size_t count = 0;
  for (const auto& [step, value] : curve) {
    sum += value;
    if (++count < size && step != curve.rbegin()->first) continue;
    result[step] = sum / static_cast<double>(count);
    sum = 0.0;
    count = 0;
  }
  return result;
}

/// Seeds as one series: at the steps that all of them have, the mean of the defined values.
Series over_seeds(const std::string& name, const std::vector<Curve>& seeds, bool with_band) {
  Series series{.name = name};
  if (seeds.empty()) return series;
  for (const auto& [step, first] : seeds[0]) {
    double sum = 0.0, low = std::numeric_limits<double>::infinity(), high = -low;
    std::size_t count = 0;
    bool everywhere = true;
    for (const auto& seed : seeds) {
      const auto found = seed.find(step);
      everywhere = everywhere && found != seed.end();
      if (found == seed.end() || std::isnan(found->second)) continue;
      sum += found->second;
      low = std::min(low, found->second);
      high = std::max(high, found->second);
      ++count;
    }
    if (!everywhere) continue;
    const auto x = static_cast<double>(step);
    series.points.push_back({x, count > 0 ? sum / static_cast<double>(count) : std::numeric_limits<double>::quiet_NaN()});
    if (with_band && seeds.size() > 1) series.band.push_back({x, low, high});
  }
  return series;
}

struct Group {
  std::string label;
  std::vector<RunCurves> seeds;

  std::vector<Curve> all(Curve RunCurves::* member) const {
    std::vector<Curve> result;
    for (const auto& seed : seeds) result.push_back(seed.*member);
    return result;
  }
};

}  // namespace

std::string curves_plot(const std::string& title, const std::vector<ReportRow>& rows) {
  std::vector<Group> groups;
  std::set<std::string> axes;
  std::size_t most_points = 0, most_seeds = 0;
  bool by_loss = true;  // then the lower panel is the validation loss, which a single row's upper one has already
  std::optional<statistics::ReferenceLine> majority;
  std::set<std::string> majorities;
  for (const auto& row : rows) {
    auto found = std::ranges::find(groups, row.label, &Group::label);
    if (found == groups.end()) found = groups.insert(groups.end(), {row.label, {}});
    found->seeds.push_back(read_curves(row));
    most_points = std::max(most_points, found->seeds.back().training_loss.size());
    most_seeds = std::max(most_seeds, found->seeds.size());
    const auto metric = row.result.at("selected_by").get<std::string>();
    const auto& split = row.result.at("splits").at(0);
    by_loss = by_loss && metric == "loss";
    axes.insert(fmt::format("{}, {}", display_name(metric), split.at("split").get<std::string>()));
    if (metric == "accuracy" && split.contains("majority_share")) {
      majority = {100.0 * split.at("majority_share").get<double>(), ""};
      majority->label = fmt::format("majority class {:.2f}", majority->value);
      majorities.insert(majority->label);
    }
  }
  const auto bin = std::max<std::size_t>(1, (most_points + kMaxPoints - 1) / kMaxPoints);
  const bool with_bands = groups.size() <= kMaxBands && most_seeds > 1;
  const bool single = groups.size() == 1;

  statistics::LinePanel loss{.y_label = single ? "loss" : "training loss", .tame_spikes = true};
  statistics::LinePanel metric{.y_label = axes.size() == 1 ? *axes.begin() : "each row's own metric ×100",
                               .tame_spikes = by_loss};
  if (majorities.size() == 1) metric.reference = majority;
  for (auto& group : groups) {
    for (auto& seed : group.seeds) seed.training_loss = averaged(seed.training_loss, bin);
    loss.series.push_back(over_seeds(single ? "training" : group.label, group.all(&RunCurves::training_loss), with_bands));
    if (single) {
      loss.series.push_back(over_seeds("validation", group.all(&RunCurves::validation_loss), with_bands));
      if (by_loss) continue;
    }
    metric.series.push_back(over_seeds(single ? "validation" : group.label, group.all(&RunCurves::metric), with_bands));
  }
  statistics::LinePlot plot{.title = title, .x_label = "optimiser steps", .panels = {loss}};
  if (single && !metric.series.empty()) {
    // The same colour for what is measured on the validation split.
    metric.series.insert(metric.series.begin(), Series{});
  }
  if (!metric.series.empty()) plot.panels.push_back(metric);
  if (most_seeds > 1) {
    plot.note = with_bands ? "Lines: mean over seeds. Bands: from the lowest seed to the highest." : "Lines: mean over seeds.";
  }
  if (bin > 1) {
    plot.note += fmt::format("{}Training loss: each point is the mean of {} logged values.", plot.note.empty() ? "" : " ", bin);
  }
  return statistics::line_plot(plot);
}

void write_curves(const std::filesystem::path& folder, const std::string& title, const std::vector<ReportRow>& rows) {
  io::write_file(folder / "curves.svg", curves_plot(title, rows));
}

}  // namespace mergex::engine
