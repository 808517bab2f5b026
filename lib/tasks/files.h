#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/table.h"
#include "tasks/labels.h"
#include "tasks/task.h"

namespace mergex::tasks {

/// How many examples of a split are used; absent: all.
struct MaxExamples {
  std::optional<std::int64_t> train, validation;
};

/// Options that all tasks share.
struct Reading {
  Files files;
  MaxExamples max_examples;
  std::int64_t max_length = 0;
  bool skip_bad_lines = false;
};

/// Reads `files` {train, validation (one or several), test}, `max_length`, `max_examples` {train, validation} and
/// `on_bad_line`. The validation files
/// are called "validation", "validation_2" ..., or as `validation_names` says as far as it goes.
Reading read_reading_options(io::JsonObject& section, std::int64_t default_max_length,
                             const std::vector<std::string>& validation_names = {});

/// The files that are there, in the order in which `load_files` reads them.
/// @throws UserError naming one that must be there and is not
std::vector<InputFile> input_files(const Files& files, const Wanted& wanted);

/// The file of a source that must be there, plain or ".gz".
std::filesystem::path required_file(const Source& source);

/// What one file held.
struct FileContent {
  std::vector<Example> examples;
  std::size_t skipped_lines = 0;
  std::string first_problem;  ///< message of the first line that was skipped
};

/// Reads what is wanted with `read`, and sees to it that what is trained or scored has labels where it needs them. Of
/// a split with more examples than `max_examples` a subset is kept that is the same for every seed, in the order of the
/// file; a smaller subset lies in every larger one. Examples without a label are not in it where labels are needed.
Data load_files(const Reading& reading, const Wanted& wanted, bool labels_needed,
                const std::function<FileContent(const std::filesystem::path&)>& read);

/// The columns of a table of examples.
struct Columns {
  io::TableColumn text;
  std::optional<io::TableColumn> text_pair = {};
  io::TableColumn label;
  io::TableColumn id;
};

/// Reads a table of examples, its format by its ending (TSV for others).
/// @param header  names of the columns of a file without a header line
FileContent read_examples(const std::filesystem::path& file, const Columns& columns,
                          const std::function<Label(std::string_view)>& read_label, bool skip_bad_lines,
                          const std::vector<std::string>& header = {});

/// What to do about a malformed line, behind the message about it.
inline constexpr std::string_view kBadLineRemedy = "fix the line, or --set /task/on_bad_line=skip";

}  // namespace mergex::tasks
