#include "tasks/span_corruption.h"

#include "core/error.h"
#include "core/utf8.h"
#include "tasks/files.h"

namespace mergex::tasks {
namespace fs = std::filesystem;
namespace {

/// One column of a table, a document a row.
FileContent read_column(const fs::path& file, io::TableFormat format, const std::string& column, bool skip_bad_lines) {
  FileContent content;
  io::Table table(file, {{.names = {column}}},
                  {.format = format, .skip_bad_lines = skip_bad_lines, .remedy = std::string(kBadLineRemedy)});
  while (const auto* row = table.next()) {
    if (row->cells[0]) {
      content.examples.push_back({.id = std::to_string(row->number), .text = std::string(*row->cells[0])});
    }
  }
  content.skipped_lines = table.skipped_lines();
  content.first_problem = table.first_problem();
  return content;
}

FileContent read_documents(const fs::path& file, const std::string& column, bool skip_bad_lines) {
  if (const auto format = io::table_format(file)) return read_column(file, *format, column, skip_bad_lines);
  FileContent content;
  io::TextLines lines(file);
  while (const auto line = lines.next()) {
    if (line->find_first_not_of(" \t") == std::string_view::npos) continue;
    if (!is_valid_utf8(*line)) {
      const auto problem = fmt::format("{}:{}: invalid UTF-8", lines.name(), lines.number());
      if (!skip_bad_lines) fail("{}; {}", problem, kBadLineRemedy);
      if (content.skipped_lines++ == 0) content.first_problem = problem;
      continue;
    }
    content.examples.push_back({.id = std::to_string(content.examples.size()), .text = std::string(*line)});
  }
  return content;
}

Task configure(io::JsonObject& section) {
  SpanCorruption options;
  section.optional("noise_density", options.noise_density, {.above = 0.0, .below = 1.0});
  section.optional("mean_span_length", options.mean_span_length, {.at_least = 1.0});
  std::string column = "text";
  section.optional("column", column);
  const auto reading = read_reading_options(section, 512);
  if (!reading.files.train && reading.files.validation.empty()) {
    fail("{}: \"files\" names neither a training nor a validation file; add {{\"train\": ..., \"validation\": ...}}",
         section.where());
  }
  return {.kind = Kind::kSpanCorruption,
          .metrics = {"loss"},
          .primary_metric = "loss",
          .max_length = reading.max_length,
          .span_corruption = options,
          .files = reading.files,
          .load = [reading, column](const Wanted& wanted) {
            auto data = load_files(reading, wanted, false,
                                   [&](const fs::path& file) {
                                     return read_documents(file, column, reading.skip_bad_lines);
                                   });
            data.metrics = {"loss"};
            return data;
          }};
}

}  // namespace

constinit const TaskEntry kSpanCorruption{
    .name = "span_corruption",
    .summary = "fill in masked spans of plain text (T5's pre-training task), one document per line or table row",
    .source = "Raffel et al. 2020, arXiv:1910.10683, section 3.3",
    .configure = configure};

}  // namespace mergex::tasks
