#include "tasks/files.h"

#include <algorithm>

#include "core/error.h"
#include "core/random.h"

namespace mergex::tasks {
namespace fs = std::filesystem;
namespace {

/// The file of `source`; nothing where it may be absent.
std::optional<fs::path> find(const Source& source) {
  if (auto found = io::find_text_file(source.path)) return found;
  if (source.if_absent != Source::Absent::kError) return std::nullopt;
  const auto key = source.split.substr(0, source.split.find('_'));  // validation_matched -> validation
  fail("{}: no such file, plain or .gz; put it there, or name another in /task/files/{}", source.path.string(), key);
}

std::size_t num_labelled(const std::vector<Example>& examples) {
  return static_cast<std::size_t>(
      std::ranges::count_if(examples, [](const Example& example) { return example.label.has_value(); }));
}

void check_examples(const Split& split, bool labels_needed, std::string_view purpose) {
  if (split.examples.empty()) fail("{}: holds no examples, nothing to {}", split.file.string(), purpose);
  if (labels_needed && num_labelled(split.examples) == 0) {
    fail("{}: none of its {} examples has a label, nothing to {}; is this the test file?", split.file.string(),
         split.examples.size(), purpose);
  }
}

/// The first `count` of a random order, as they stand in the file. The order does not depend on a run's seed: rows of
/// a sweep that differ in it see the same examples.
void keep_subset(std::vector<Example>& examples, std::size_t count) {
  if (examples.size() <= count) return;
  auto chosen = random_permutation(examples.size(), stream_seed(0, "max_examples"));
  chosen.resize(count);
  std::ranges::sort(chosen);
  for (std::size_t i = 0; i < count; ++i) {
    if (chosen[i] != i) examples[i] = std::move(examples[chosen[i]]);
  }
  examples.resize(count);
}

}  // namespace

fs::path required_file(const Source& source) {
  auto must = source;
  must.if_absent = Source::Absent::kError;
  return *find(must);
}

Reading read_reading_options(io::JsonObject& section, std::int64_t default_max_length,
                             const std::vector<std::string>& validation_names) {
  Reading reading;
  auto& files = reading.files;
  files.where = section.where();
  auto object = section.object_or_empty("files");
  if (auto path = object.path("train")) files.train = Source{"train", *path};
  for (auto& path : object.paths("validation")) {
    const auto i = files.validation.size();
    auto name = i < validation_names.size() ? validation_names[i]
                : i == 0                    ? std::string("validation")
                                            : fmt::format("validation_{}", i + 1);
    files.validation.push_back({std::move(name), std::move(path)});
  }
  if (auto path = object.path("test")) files.test = Source{"test", *path};
  object.finish();

  reading.max_length = default_max_length;
  section.optional("max_length", reading.max_length, {.at_least = 2});
  if (auto limits = section.object("max_examples")) {
    reading.max_examples.train = limits->maybe<std::int64_t>("train", {.at_least = 1});
    reading.max_examples.validation = limits->maybe<std::int64_t>("validation", {.at_least = 1});
    limits->finish();
  }
  static const std::vector<std::string> kOnBadLine{"error", "skip"};
  reading.skip_bad_lines = section.choice("on_bad_line", kOnBadLine, 0) == 1;
  return reading;
}

std::vector<InputFile> input_files(const Files& files, const Wanted& wanted) {
  std::vector<InputFile> found;
  const auto add = [&](const Source& source) {
    if (auto path = find(source)) found.push_back({source.split, std::move(*path)});
  };
  if (wanted.train) {
    if (!files.train) fail("{}: names no training file; add it as /task/files/train", files.where);
    found.push_back({files.train->split, required_file(*files.train)});
  }
  if (wanted.validation) std::ranges::for_each(files.validation, add);
  if (wanted.test && files.test) add(*files.test);
  return found;
}

Data load_files(const Reading& reading, const Wanted& wanted, bool labels_needed,
                const std::function<FileContent(const fs::path&)>& read) {
  const auto& files = reading.files;
  Data data;
  for (const auto& [name, path] : input_files(files, wanted)) {
    auto content = read(path);
    if (content.skipped_lines > 0) {
      data.warnings.push_back(fmt::format("{}: {} malformed line{} skipped; the first: {}", path.string(),
                                          content.skipped_lines, content.skipped_lines == 1 ? "" : "s",
                                          content.first_problem));
      data.skipped_lines += content.skipped_lines;
    }
    data.files.push_back(path);
    Split split{name, std::move(content.examples), path};
    if (name == "test") {
      data.test = std::move(split);
      continue;
    }
    const bool is_train = name == "train";
    const auto& limit = is_train ? reading.max_examples.train : reading.max_examples.validation;
    check_examples(split, labels_needed, is_train ? "train on" : "score");
    if (labels_needed && (is_train || limit)) {
      const auto removed = std::erase_if(split.examples, [](const Example& example) { return !example.label; });
      if (removed > 0) {
        data.notes.push_back(fmt::format("{}: {} of {} examples have no label and are left out{}", path.string(), removed,
                                         removed + split.examples.size(), is_train ? " of training" : ""));
      }
    }
    if (limit) keep_subset(split.examples, static_cast<std::size_t>(*limit));
    if (is_train) {
      data.train = std::move(split);
    } else {
      data.validation.push_back(std::move(split));
    }
  }
  if (wanted.validation) {
    for (const auto& source : files.validation) {
      if (source.if_absent != Source::Absent::kWarn || find(source)) continue;
      data.warnings.push_back(
          fmt::format("{}: no such file, plain or .gz: {} is not scored", source.path.string(), source.split));
    }
  }
  return data;
}

FileContent read_examples(const fs::path& file, const Columns& columns,
                          const std::function<Label(std::string_view)>& read_label, bool skip_bad_lines,
                          const std::vector<std::string>& header) {
  std::vector<io::TableColumn> wanted{columns.text, columns.label, columns.id};
  if (columns.text_pair) wanted.push_back(*columns.text_pair);
  io::Table table(file, std::move(wanted),
                  {.format = io::table_format(file).value_or(io::TableFormat::kTsv),
                   .header = header,
                   .skip_bad_lines = skip_bad_lines,
                   .remedy = std::string(kBadLineRemedy)});
  FileContent content;
  while (const auto* row = table.next()) {
    Label label;
    if (const auto& cell = row->cells[1]) label = read_label(*cell);
    if (!label.problem.empty()) {
      table.reject(label.problem);
      continue;
    }
    const auto& id = row->cells[2];
    Example example{.id = id && !id->empty() ? std::string(*id) : std::to_string(row->number),
                    .text = std::string(*row->cells[0]),
                    .label = label.value};
    if (columns.text_pair) example.text_pair.emplace(*row->cells[3]);
    content.examples.push_back(std::move(example));
  }
  content.skipped_lines = table.skipped_lines();
  content.first_problem = table.first_problem();
  return content;
}

}  // namespace mergex::tasks
