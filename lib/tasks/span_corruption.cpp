#include "tasks/span_corruption.h"

#include "core/error.h"
#include "tasks/files.h"

namespace mergex::tasks {
namespace fs = std::filesystem;
namespace {

FileContent read_documents(const fs::path& file, bool skip_bad_lines) {
  FileContent content;
  io::TextLines lines(file);
  while (const auto line = lines.next()) {
    if (line->find_first_not_of(" \t") == std::string_view::npos) continue;
    if (!io::is_valid_utf8(*line)) {
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
  const auto reading = read_reading_options(section, 512);
  if (!reading.files.train && reading.files.validation.empty()) {
    fail("{}: \"files\" names neither a training nor a validation file; add {{\"train\": ..., \"validation\": ...}}",
         section.where());
  }
  return {.kind = Kind::kSpanCorruption,
          .metrics = {"loss"},
          .primary_metric = "loss",
          .higher_is_better = false,
          .max_length = reading.max_length,
          .span_corruption = options,
          .load = [reading](const Wanted& wanted) {
            auto data = load_files(reading.files, wanted, false,
                                   [&](const fs::path& file) { return read_documents(file, reading.skip_bad_lines); });
            data.metrics = {"loss"};
            return data;
          }};
}

}  // namespace

constinit const TaskEntry kSpanCorruption{
    .name = "span_corruption",
    .summary = "fill in masked spans of plain text (T5's pre-training task), one document per line",
    .source = "Raffel et al. 2020, arXiv:1910.10683, section 3.3",
    .configure = configure};

}  // namespace mergex::tasks
