#include "tasks/table_task.h"

#include <algorithm>
#include <set>

#include "core/error.h"
#include "core/one_line.h"
#include "core/suggest.h"
#include "tasks/files.h"

namespace mergex::tasks {
namespace fs = std::filesystem;
namespace {

using Names = std::vector<std::string>;

const Names kClassificationMetrics{"accuracy", "f1", "matthews"};
const Names kRegressionMetrics{"pearson", "spearman"};

Columns read_columns(io::JsonObject& section) {
  auto object = section.object_or_empty("columns");
  std::string text = "text", label = "label";
  object.optional("text", text);
  const auto text_pair = object.maybe<std::string>("text_pair");
  object.optional("label", label);
  const auto id = object.maybe<std::string>("id");
  object.finish();
  Columns columns{.text = {{text}}, .label = {{label}, false}, .id = {{"id", "index", "idx"}, false}};
  if (text_pair) columns.text_pair = io::TableColumn{{*text_pair}};
  if (id) columns.id = {{*id}};
  return columns;
}

/// The user's files say in which format they are by their ending; anything else is a mistake.
void check_endings(const Files& files) {
  const auto check = [&](const Source& source) {
    if (io::table_format(source.path)) return;
    fail("{}: got \"{}\", expected a file that ends in .tsv, .csv or .jsonl, each also with .gz behind it", files.where,
         one_line(source.path.string()));
  };
  if (files.train) check(*files.train);
  for (const auto& source : files.validation) check(source);
  if (files.test) check(*files.test);
}

Reading read_files(io::JsonObject& section) {
  auto reading = read_reading_options(section, 128);
  if (!reading.files.train && reading.files.validation.empty()) {
    fail("{}: \"files\" names neither a training nor a validation file; add {{\"train\": ..., \"validation\": ...}}",
         section.where());
  }
  check_endings(reading.files);
  return reading;
}

/// Reads `metrics` and `select_by`; what is not given stays empty.
void read_metrics(io::JsonObject& section, const Names& known, Task& task) {
  if (section.has("metrics")) {
    task.metrics = section.required<Names>("metrics");
    for (const auto& metric : task.metrics) {
      if (std::ranges::find(known, metric) != known.end()) continue;
      section.fail_value("metrics", fmt::format("no metric \"{}\" of this task, expected {}{}", metric,
                                                quoted_list(known), did_you_mean(metric, known)));
    }
    if (task.metrics.empty()) section.fail_value("metrics", fmt::format("expected some of {}", quoted_list(known)));
  }
  if (section.has("select_by")) {
    const auto& among = task.metrics.empty() ? known : task.metrics;
    task.primary_metric = among[section.choice("select_by", among, 0)];
  }
}

/// The given metrics, or those that suit the number of classes; always with the one that selects.
Names metrics_for(std::size_t num_labels, const Names& given, const std::string& primary, const std::string& where) {
  Names metrics = !given.empty() ? given : num_labels == 2 ? kClassificationMetrics : Names{"accuracy"};
  if (std::ranges::find(metrics, primary) == metrics.end()) metrics.push_back(primary);
  if (num_labels != 2 && std::ranges::find(metrics, "f1") != metrics.end()) {
    fail("{}: f1 is that of the second of two classes, the task has {}; use accuracy or matthews", where, num_labels);
  }
  return metrics;
}

Names labels_of(const fs::path& file, const Columns& columns, bool skip_bad_lines) {
  Names cells;
  std::set<std::string, std::less<>> seen;
  read_examples(
      file, columns,
      [&](std::string_view cell) {
        if (!cell.empty() && cell != "-1" && !seen.contains(cell)) seen.emplace(cell);
        return Label{};
      },
      skip_bad_lines);
  return distinct_labels({seen.begin(), seen.end()});
}

Task configure_classification(io::JsonObject& section) {
  Task task{.kind = Kind::kClassification};
  const auto columns = read_columns(section);
  const auto reading = read_files(section);
  task.max_length = reading.max_length;
  task.files = reading.files;
  if (section.has("labels")) {
    task.labels = section.required<Names>("labels");
    const std::set<std::string> distinct(task.labels.begin(), task.labels.end());
    if (distinct.size() < 2 || distinct.size() != task.labels.size()) {
      section.fail_value("labels", "expected at least two names, each once");
    }
  } else if (!reading.files.train) {
    fail("{}: \"labels\" is missing; without a training file their names must be given", section.where());
  }
  read_metrics(section, kClassificationMetrics, task);
  const auto given = task.metrics;
  if (task.primary_metric.empty()) task.primary_metric = given.empty() ? "accuracy" : given.front();
  if (!task.labels.empty()) {
    task.metrics = metrics_for(task.labels.size(), given, task.primary_metric, section.where());
  } else if (given.empty()) {
    task.metrics = {task.primary_metric};
  }

  task.load = [=, labels = task.labels, primary = task.primary_metric, where = section.where()](const Wanted& wanted) {
    auto names = labels;
    if (names.empty()) {
      const auto file = required_file(*reading.files.train);
      names = labels_of(file, columns, reading.skip_bad_lines);
      if (names.size() < 2) {
        fail(
            "{}: found {} in the column {}, expected at least two labels; name the column in /task/columns/label, or "
            "the labels in /task/labels",
            file.string(), names.empty() ? "no label" : fmt::format("the one label \"{}\"", names.front()),
            quoted_list(columns.label.names));
      }
    }
    const auto metrics = metrics_for(names.size(), given, primary, where);
    auto data = load_files(reading, wanted, true, [&](const fs::path& file) {
      return read_examples(
          file, columns, [&](std::string_view cell) { return class_label(cell, names); }, reading.skip_bad_lines);
    });
    data.labels = names;
    data.metrics = metrics;
    return data;
  };
  return task;
}

Task configure_regression(io::JsonObject& section) {
  Task task{.kind = Kind::kRegression};
  const auto columns = read_columns(section);
  const auto reading = read_files(section);
  task.max_length = reading.max_length;
  task.files = reading.files;
  read_metrics(section, kRegressionMetrics, task);
  if (task.metrics.empty()) task.metrics = kRegressionMetrics;
  if (task.primary_metric.empty()) task.primary_metric = task.metrics.back();
  task.load = [=, metrics = task.metrics](const Wanted& wanted) {
    auto data = load_files(reading, wanted, true, [&](const fs::path& file) {
      return read_examples(
          file, columns, [](std::string_view cell) { return score_label(cell); }, reading.skip_bad_lines);
    });
    data.metrics = metrics;
    return data;
  };
  return task;
}

}  // namespace

constinit const TaskEntry kClassification{
    .name = "classification",
    .summary = "your own texts or pairs of texts with a class each, from .tsv, .csv or .jsonl files",
    .source = "your files",
    .configure = configure_classification};

constinit const TaskEntry kRegression{
    .name = "regression",
    .summary = "your own texts or pairs of texts with a score each, from .tsv, .csv or .jsonl files",
    .source = "your files",
    .configure = configure_regression};

}  // namespace mergex::tasks
