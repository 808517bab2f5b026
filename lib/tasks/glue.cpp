#include "tasks/glue.h"

#include "core/error.h"
#include "tasks/files.h"
#include "tasks/text_to_text.h"

namespace mergex::tasks {
namespace fs = std::filesystem;
namespace {

using Names = std::vector<std::string>;

/// What differs between the tasks.
struct Layout {
  std::string name;  ///< T5's, in front of its inputs
  Names keys;        ///< T5's, of the text and the second text
  Names labels = {};  ///< in the order of the class numbers; empty for regression
  Names metrics;
  std::string primary_metric;
  Names text, text_pair = {}, label;  ///< names of the columns, the archive's first
  std::string no_label = {};          ///< a label cell that says that there is none
  Names headerless = {};              ///< columns of files whose first line does not name the `text` column
  Names dev_files = {"dev.tsv"};
  Names validation_names = {"validation"};
  std::string test_file = "test.tsv";
};

/// CoLA's train and dev files have no header, its test file has one.
bool has_header(const fs::path& file, const Layout& layout) {
  if (layout.headerless.empty() || io::table_format(file).value_or(io::TableFormat::kTsv) != io::TableFormat::kTsv) {
    return true;
  }
  io::TextLines lines(file);
  const std::string first(lines.next().value_or(""));
  return ("\t" + first + "\t").find("\t" + layout.text.front() + "\t") != std::string::npos;
}

/// Fills in the files of the archive for the splits that `files` does not name.
void add_archive_files(const fs::path& folder, const Layout& layout, Files& files) {
  if (!files.train) files.train = Source{"train", folder / "train.tsv"};
  if (files.validation.empty()) {
    for (std::size_t i = 0; i < layout.dev_files.size(); ++i) {
      files.validation.push_back({layout.validation_names[i], folder / layout.dev_files[i],
                                  i == 0 ? Source::Absent::kError : Source::Absent::kWarn});
    }
  }
  if (!files.test) files.test = Source{"test", folder / layout.test_file, Source::Absent::kIgnore};
}

Task configure(io::JsonObject& section, Layout layout) {
  static const Names kFormats{"plain", "text_to_text"};
  const bool text_to_text = section.choice("format", kFormats, 0) == 1;
  const auto data_dir = section.path("data_dir");
  auto reading = read_reading_options(section, 128, layout.validation_names);
  if (data_dir) {
    add_archive_files(*data_dir, layout, reading.files);
  } else if (!reading.files.train && reading.files.validation.empty()) {
    fail("{}: \"data_dir\" is missing; add the folder that holds train.tsv and {}, or name the \"files\"",
         section.where(), layout.dev_files.front());
  }

  const bool regression = layout.labels.empty();
  Task task{.kind = regression ? Kind::kRegression : Kind::kClassification,
            .labels = layout.labels,
            .metrics = layout.metrics,
            .primary_metric = layout.primary_metric,
            .max_length = reading.max_length,
            .text_to_text = text_to_text,
            .files = reading.files};
  task.load = [=](const Wanted& wanted) {
    Columns columns{.text = {layout.text}, .label = {layout.label, false}, .id = {{"index", "id", "idx"}, false}};
    if (!layout.text_pair.empty()) columns.text_pair = io::TableColumn{layout.text_pair};
    const auto read_label = [&](std::string_view cell) {
      if (regression) return score_label(cell, {.at_least = 0.0, .at_most = 5.0}, -1.0);
      return class_label(cell, layout.labels, layout.no_label);
    };
    auto data = load_files(reading, wanted, true, [&](const fs::path& file) {
      auto content = read_examples(file, columns, read_label, reading.skip_bad_lines,
                                   has_header(file, layout) ? Names{} : layout.headerless);
      if (text_to_text) {
        for (auto& example : content.examples) make_text_to_text(example, layout.name, layout.keys, layout.labels);
      }
      return content;
    });
    data.labels = layout.labels;
    data.metrics = layout.metrics;
    return data;
  };
  return task;
}

}  // namespace

constinit const TaskEntry kGlueCola{
    .name = "glue/cola",
    .summary = "is a sentence grammatical? 8,551 training sentences, Matthews correlation",
    .source = "Warstadt et al. 2019, arXiv:1805.12471, in GLUE",
    .configure = [](io::JsonObject& section) {
      return configure(section, {.name = "cola",
                                 .keys = {"sentence"},
                                 .labels = {"unacceptable", "acceptable"},
                                 .metrics = {"matthews", "accuracy"},
                                 .primary_metric = "matthews",
                                 .text = {"sentence"},
                                 .label = {"label"},
                                 .headerless = {"source", "label", "mark", "sentence"}});
    }};

constinit const TaskEntry kGlueSst2{
    .name = "glue/sst2",
    .summary = "sentiment of a phrase or sentence from film reviews, 67,349 to train on, accuracy",
    .source = "Socher et al. 2013 (EMNLP), in GLUE",
    .configure = [](io::JsonObject& section) {
      return configure(section, {.name = "sst2",
                                 .keys = {"sentence"},
                                 .labels = {"negative", "positive"},
                                 .metrics = {"accuracy"},
                                 .primary_metric = "accuracy",
                                 .text = {"sentence"},
                                 .label = {"label"}});
    }};

constinit const TaskEntry kGlueMrpc{
    .name = "glue/mrpc",
    .summary = "are two sentences from the news paraphrases? 3,668 training pairs, F1 and accuracy",
    .source = "Dolan and Brockett 2005 (IWP), in GLUE",
    .configure = [](io::JsonObject& section) {
      return configure(section, {.name = "mrpc",
                                 .keys = {"sentence1", "sentence2"},
                                 .labels = {"not_equivalent", "equivalent"},
                                 .metrics = {"accuracy", "f1"},
                                 .primary_metric = "f1",
                                 .text = {"#1 String", "sentence1"},
                                 .text_pair = {"#2 String", "sentence2"},
                                 .label = {"Quality", "label"}});
    }};

constinit const TaskEntry kGlueStsb{
    .name = "glue/stsb",
    .summary = "how similar are two sentences, 0 to 5? 5,749 training pairs, Pearson and Spearman correlation",
    .source = "Cer et al. 2017, arXiv:1708.00055, in GLUE",
    .configure = [](io::JsonObject& section) {
      return configure(section, {.name = "stsb",
                                 .keys = {"sentence1", "sentence2"},
                                 .metrics = {"pearson", "spearman"},
                                 .primary_metric = "spearman",
                                 .text = {"sentence1"},
                                 .text_pair = {"sentence2"},
                                 .label = {"score", "label"}});
    }};

constinit const TaskEntry kGlueQqp{
    .name = "glue/qqp",
    .summary = "do two questions from Quora ask the same? 363,846 training pairs, F1 and accuracy",
    .source = "Quora 2017, in GLUE: Wang et al. 2019, arXiv:1804.07461, gluebenchmark.com",
    .configure = [](io::JsonObject& section) {
      return configure(section, {.name = "qqp",
                                 .keys = {"question1", "question2"},
                                 .labels = {"not_duplicate", "duplicate"},
                                 .metrics = {"accuracy", "f1"},
                                 .primary_metric = "f1",
                                 .text = {"question1"},
                                 .text_pair = {"question2"},
                                 .label = {"is_duplicate", "label"}});
    }};

constinit const TaskEntry kGlueMnli{
    .name = "glue/mnli",
    .summary = "does a premise entail a hypothesis? 392,702 training pairs, accuracy on matched and mismatched genres",
    .source = "Williams et al. 2018, arXiv:1704.05426, in GLUE",
    .configure = [](io::JsonObject& section) {
      return configure(section, {.name = "mnli",
                                 .keys = {"premise", "hypothesis"},
                                 .labels = {"entailment", "neutral", "contradiction"},
                                 .metrics = {"accuracy"},
                                 .primary_metric = "accuracy",
                                 .text = {"sentence1", "premise"},
                                 .text_pair = {"sentence2", "hypothesis"},
                                 .label = {"gold_label", "label"},
                                 .no_label = "-",  // the annotators did not agree
                                 .dev_files = {"dev_matched.tsv", "dev_mismatched.tsv"},
                                 .validation_names = {"validation_matched", "validation_mismatched"},
                                 .test_file = "test_matched.tsv"});
    }};

constinit const TaskEntry kGlueQnli{
    .name = "glue/qnli",
    .summary = "does a sentence answer a question? 104,743 training pairs from SQuAD, accuracy",
    .source = "Rajpurkar et al. 2016, arXiv:1606.05250, recast in GLUE",
    .configure = [](io::JsonObject& section) {
      return configure(section, {.name = "qnli",
                                 .keys = {"question", "sentence"},
                                 .labels = {"entailment", "not_entailment"},
                                 .metrics = {"accuracy"},
                                 .primary_metric = "accuracy",
                                 .text = {"question"},
                                 .text_pair = {"sentence"},
                                 .label = {"label"}});
    }};

constinit const TaskEntry kGlueRte{
    .name = "glue/rte",
    .summary = "does a text from news or Wikipedia entail a hypothesis? 2,490 training pairs, accuracy",
    .source = "Dagan et al. 2006 and the later RTE challenges, in GLUE",
    .configure = [](io::JsonObject& section) {
      return configure(section, {.name = "rte",
                                 .keys = {"sentence1", "sentence2"},
                                 .labels = {"entailment", "not_entailment"},
                                 .metrics = {"accuracy"},
                                 .primary_metric = "accuracy",
                                 .text = {"sentence1"},
                                 .text_pair = {"sentence2"},
                                 .label = {"label"}});
    }};

constinit const TaskEntry kGlueWnli{
    .name = "glue/wnli",
    .summary = "what does a pronoun refer to, as entailment? 635 training pairs, accuracy",
    .source = "Levesque et al. 2012 (KR), recast in GLUE",
    .configure = [](io::JsonObject& section) {
      return configure(section, {.name = "wnli",
                                 .keys = {"sentence1", "sentence2"},
                                 .labels = {"not_entailment", "entailment"},
                                 .metrics = {"accuracy"},
                                 .primary_metric = "accuracy",
                                 .text = {"sentence1"},
                                 .text_pair = {"sentence2"},
                                 .label = {"label"}});
    }};

}  // namespace mergex::tasks
