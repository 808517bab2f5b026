#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/json_object.h"

namespace mergex::tasks {

enum class Kind { kClassification, kRegression, kSpanCorruption };

struct Example {
  std::string id;  ///< the file's own id, else the row's number counted from 0
  std::string text;
  std::optional<std::string> text_pair = {};
  std::optional<double> label = {};  ///< index of the class, or the score; absent: not known, so never scored
  std::optional<std::string> target = {};  ///< text to text: the answer; absent where the label is
};

struct Split {
  std::string name;  ///< "train", "validation", "validation_matched", "test" ...
  std::vector<Example> examples;
  std::filesystem::path file;
};

/// What a command needs of a task's data.
struct Wanted {
  bool train = true;
  bool validation = true;
  bool test = false;
};

struct Data {
  Split train;                    ///< every example has a label (span corruption: none has, the text is its own)
  std::vector<Split> validation;  ///< all are scored; the first one selects
  std::optional<Split> test;
  std::vector<std::string> labels;   ///< names of the classes, also where the recipe left them to the training file
  std::vector<std::string> metrics;  ///< likewise
  std::vector<std::filesystem::path> files;  ///< all that were read
  std::size_t skipped_lines = 0;             ///< malformed ones, under `on_bad_line` "skip"
  std::vector<std::string> warnings, notes;  ///< what the user should be told of the files
};

/// Raffel et al. 2020, section 3.3 (arXiv:1910.10683).
struct SpanCorruption {
  double noise_density = 0.15;    ///< fraction of the tokens that is masked
  double mean_span_length = 3.0;  ///< tokens
};

/// A file that a split is read from; plain or ".gz" is found either way.
struct Source {
  enum class Absent { kError, kWarn, kIgnore };
  std::string split;
  std::filesystem::path path;
  Absent if_absent = Absent::kError;
};

/// Where the splits of a task lie.
struct Files {
  std::optional<Source> train;
  std::vector<Source> validation;
  std::optional<Source> test;
  std::string where;  ///< the section, for messages: "recipe.json#/task"
};

/// A file that was found.
struct InputFile {
  std::string split;
  std::filesystem::path path;
};

/// What a recipe's `task` section says. Reading the files is a step of its own.
struct Task {
  std::string name = {};
  Kind kind = Kind::kClassification;
  std::vector<std::string> labels = {};   ///< by class; empty while the training file decides, and without classes
  std::vector<std::string> metrics = {};  ///< of accuracy, f1 (of class 1), matthews, pearson, spearman, loss
  std::string primary_metric = {};        ///< the one that selects
  std::int64_t max_length = 0;            ///< tokens of an encoded example, special ones included
  std::optional<SpanCorruption> span_corruption = {};
  bool text_to_text = false;  ///< the answer is a text that a language model gives, and is turned into class or score
  bool cache = true;          ///< whether the encoded data may be kept on disk
  Files files = {};
  /// @throws UserError naming the file (and line) that is missing, malformed or without labels
  std::function<Data(const Wanted&)> load = {};

  /// Whether targets are sequences of tokens.
  bool is_sequence_to_sequence() const { return text_to_text || kind == Kind::kSpanCorruption; }
};

struct TaskEntry {
  std::string_view name, summary, source;
  Task (*configure)(io::JsonObject& section);
};

}  // namespace mergex::tasks
