#include "report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "curves.h"
#include "io/atomic_file.h"
#include "statistics/plot.h"
#include "statistics/summary.h"

namespace mergex::engine {
using io::Json;
using statistics::Cell;

namespace {

int digits(const std::string& metric) { return metric == "loss" ? 4 : 2; }

const Json* split_of(const Json& result, const std::string& name) {
  for (const auto& split : result.at("splits")) {
    if (split.at("split") == name) return &split;
  }
  return nullptr;
}

/// The metric of every run that has a defined one, scaled for display.
std::vector<double> values(const std::vector<Json>& results, const std::string& split, const std::string& metric) {
  std::vector<double> found;
  for (const auto& result : results) {
    const auto* s = split_of(result, split);
    if (s == nullptr) continue;
    if (const auto value = s->find(metric); value != s->end() && value->is_number()) {
      found.push_back(value->get<double>() * display_scale(metric));
    }
  }
  return found;
}

/// Mean and deviation; says so where some of the runs have no defined value.
Cell summary_cell(const std::vector<double>& found, std::size_t num_runs, int number_of_digits) {
  if (found.empty()) return num_runs == 0 ? Cell() : Cell("undefined");
  const auto cell = statistics::mean_deviation(statistics::summarize(found), number_of_digits);
  return found.size() == num_runs ? cell : Cell(fmt::format("{} ({} of {})", *cell, found.size(), num_runs));
}

std::vector<double> expert_values(const std::vector<Json>& results, const char* key) {
  std::vector<double> found;
  for (const auto& result : results) {
    if (const auto experts = result.find("experts"); experts != result.end()) found.push_back(experts->at(key));
  }
  return found;
}

}  // namespace

double display_scale(const std::string& metric) { return metric == "loss" ? 1.0 : 100.0; }
std::string display_name(const std::string& metric) { return metric == "loss" ? metric : metric + " ×100"; }

Report::Report(std::string title, std::vector<ReportRow> rows, std::vector<std::string> failures)
    : title_(std::move(title)), rows_(std::move(rows)), failures_(std::move(failures)), table_({{.header = "row"}}) {
  for (const auto& row : rows_) {
    auto found = std::ranges::find(groups_, row.label, &Group::label);
    if (found == groups_.end()) {
      groups_.push_back({row.label, {}});
      found = groups_.end() - 1;
    }
    found->results.push_back(row.result);
  }
  if (groups_.empty()) return;
  build_table();
  build_notes();
}

void Report::build_table() {
  using statistics::Align;
  struct Shown {
    std::string split, metric;
    bool operator==(const Shown&) const = default;
  };
  std::vector<Shown> shown;
  std::set<std::string> split_names;
  for (const auto& group : groups_) {  // rows of several tasks need not have the same metrics
    const auto& result = group.results[0];
    for (const auto& split : result.at("splits")) {
      split_names.insert(split.at("split").get<std::string>());
      for (const auto& [key, value] : split.items()) {
        const bool is_metric = key != "split" && key != "n" && !key.starts_with("majority") && key != "collapsed" &&
                               key != "unparsable";
        const Shown column{split.at("split"), key};
        if (is_metric && (key != "loss" || result.at("selected_by") == "loss") &&
            std::ranges::find(shown, column) == shown.end()) {
          shown.push_back(column);
        }
      }
    }
  }
  const bool several_splits = split_names.size() > 1;
  std::vector<statistics::Column> columns{{"row", Align::left}};
  for (const auto& [split, metric] : shown) {
    columns.push_back({(several_splits ? split + " " : "") + display_name(metric), Align::right});
  }
  columns.push_back({"seeds", Align::right});
  const bool has_experts =
      std::ranges::any_of(groups_, [](const Group& group) { return group.results[0].contains("experts"); });
  if (has_experts) {
    for (const char* header : {"‖τ‖/‖E_m‖", "mask kept", "router entropy", "experts per unit"}) {
      columns.push_back({header, Align::right});
    }
  }
  table_ = statistics::Table(columns);
  for (const auto& group : groups_) {
    std::vector<Cell> cells{group.label};
    for (const auto& [split, metric] : shown) {
      const auto* own = split_of(group.results[0], split);
      const bool measured = own != nullptr && own->contains(metric);
      cells.push_back(summary_cell(values(group.results, split, metric), measured ? group.results.size() : 0, digits(metric)));
    }
    cells.push_back(std::to_string(group.results.size()));
    if (has_experts) {
      for (const char* key : {"task_vector_ratio", "kept_fraction", "router_entropy", "experts_per_unit"}) {
        const auto found = expert_values(group.results, key);
        cells.push_back(summary_cell(found, found.size(), 3));
      }
    }
    table_.add_row(std::move(cells));
  }
}

void Report::build_notes() {
  std::set<std::string> seen;
  std::size_t most_seeds = 0;
  bool has_experts = false;
  const auto add_once = [&](const std::string& note) {
    if (seen.insert(note).second) notes_.push_back(note);
  };
  for (const auto& group : groups_) {
    const auto& result = group.results[0];
    const auto& split = result.at("splits")[0];
    add_once(fmt::format("{} on {} ({} {}); each run reports its best checkpoint by {}.",
                         result.at("task").get<std::string>(), split.at("split").get<std::string>(),
                         split.at("n").get<std::int64_t>(), result.at("unit").get<std::string>(),
                         result.at("selected_by").get<std::string>()));
    if (const auto majority = split.find("majority_share"); majority != split.end()) {
      add_once(fmt::format("Always answering \"{}\" would score an accuracy of {:.2f}.",
                           split.at("majority_class").get<std::string>(), 100.0 * majority->get<double>()));
    }
    if (const auto skipped = result.value("skipped_lines", 0); skipped > 0) {
      add_once(fmt::format("{} malformed lines of the data were skipped.", skipped));
    }
    most_seeds = std::max(most_seeds, group.results.size());
    has_experts = has_experts || result.contains("experts");
  }
  if (most_seeds > 1) notes_.push_back("± is the sample standard deviation over seeds.");
  if (has_experts) {
    notes_.push_back(
        "‖τ‖/‖E_m‖: how far experts have moved from their base; near 0, rows of expert methods must tie. Entropy in nats.");
  }
  for (const auto& group : groups_) {
    const auto& split = group.results[0].at("splits")[0];
    const auto split_name = split.at("split").get<std::string>();
    for (const auto& result : group.results) {
      for (const auto& each : result.at("splits")) {
        if (const auto unparsable = each.value("unparsable", 0); unparsable > 0) {
          notes_.push_back(fmt::format("{} (seed {}) on {}: {} of {} generated answers name no {}.", group.label,
                                       result.at("seed").get<std::int64_t>(), each.at("split").get<std::string>(),
                                       unparsable, each.at("n").get<std::int64_t>(),
                                       each.contains("pearson") ? "number, and are scored as -1"
                                                                : "class, and are wrong"));
        }
        const auto collapsed = each.find("collapsed");
        if (collapsed == each.end()) continue;
        notes_.push_back(fmt::format("{} (seed {}) on {}: {}", group.label, result.at("seed").get<std::int64_t>(),
                                     each.at("split").get<std::string>(), collapsed->get<std::string>()));
      }
    }
    const auto accuracy = values(group.results, split_name, "accuracy");
    if (accuracy.empty() || !split.contains("majority_share")) continue;
    const auto majority = split.at("majority_share").get<double>();
    // Two standard errors of a share measured on this many examples.
    const auto margin = 200.0 * std::sqrt(majority * (1.0 - majority) / split.at("n").get<double>());
    if (std::abs(statistics::summarize(accuracy).mean - 100.0 * majority) < margin) {
      notes_.push_back(fmt::format("{}: not distinguishable from the majority class.", group.label));
    }
  }
  for (const auto& failure : failures_) notes_.push_back("failed: " + failure);
}

std::string Report::plot() const {
  statistics::DotPlot plot;
  plot.title = title_;
  std::set<std::string> axes, majorities;
  double share = 0.0;
  for (const auto& group : groups_) {
    const auto& result = group.results[0];
    const auto metric = result.at("selected_by").get<std::string>();
    const auto& split = result.at("splits")[0];
    const auto split_name = split.at("split").get<std::string>();
    plot.rows.push_back({group.label, values(group.results, split_name, metric)});
    plot.digits = digits(metric);
    axes.insert(fmt::format("{}, {}", display_name(metric), split_name));
    if (metric != "accuracy" || !split.contains("majority_share")) continue;
    share = 100.0 * split.at("majority_share").get<double>();
    majorities.insert(fmt::format("majority class {:.2f}", share));
  }
  plot.axis_label = axes.size() == 1 ? *axes.begin() : "each row's own metric ×100";
  if (majorities.size() == 1) plot.reference = {share, *majorities.begin()};
  return statistics::dot_plot(plot);
}

std::string Report::terminal() const {
  auto text = fmt::format("\n{}\n\n{}\n", title_, table_.terminal());
  for (const auto& note : notes_) text += note + "\n";
  return text;
}

void Report::write(const std::filesystem::path& folder) const {
  auto markdown = fmt::format("# {}\n\n{}\n", title_, table_.markdown());
  for (const auto& note : notes_) markdown += "- " + note + "\n";
  io::write_file(folder / "table.md", markdown);
  io::write_file(folder / "table.csv", table_.csv());
  io::write_file(folder / "scores.svg", plot());
  write_curves(folder, title_, rows_);
}

std::string Report::where(const std::filesystem::path& folder) const {
  return fmt::format("table: {}  plots: {} {}", (folder / "table.md").string(), (folder / "scores.svg").string(),
                     (folder / "curves.svg").string());
}

}  // namespace mergex::engine
