#include "support/catch.h"
#include "support/paths.h"
#include "tasks/task_section.h"

using namespace mergex;
using Names = std::vector<std::string>;

namespace {

const char* const kTrain = "text\tlabel\ngood\tpos\nbad\tneg\nfine\tpos\n";

}  // namespace

TEST_CASE("classification: the training file's labels, the metrics of two classes", "[tasks]") {
  const test::TemporaryFolder folder;
  test::write_text(folder / "train.tsv", kTrain);
  test::write_text(folder / "dev.csv", "label,text\nneg,\"bad, really\"\n,unknown\n");
  const auto file = (folder / "r.json").string();  // paths are relative to the recipe
  const auto task =
      test::task_of(R"({"name": "classification", "files": {"train": "train.tsv", "validation": "dev.csv"}})", file);
  CHECK(task.kind == tasks::Kind::kClassification);
  CHECK(task.labels.empty());
  CHECK(task.primary_metric == "accuracy");
  const auto data = task.load({});
  CHECK(data.labels == Names{"neg", "pos"});
  CHECK(data.metrics == Names{"accuracy", "f1", "matthews"});
  CHECK(data.train.examples.at(0).label == 1.0);
  CHECK(data.train.examples.at(1).label == 0.0);
  REQUIRE(data.validation.at(0).examples.size() == 2);
  CHECK(data.validation[0].examples[0].text == "bad, really");
  CHECK(data.validation[0].examples[0].label == 0.0);
  CHECK_FALSE(data.validation[0].examples[1].label);

  test::write_text(folder / "dev.csv", "label,text\nneutral,x\n");
  CHECK(test::user_error([&] { task.load({}); }) ==
        (folder / "dev.csv").string() +
            ":2: found label \"neutral\", expected \"neg\" or \"pos\" (or 0..1); fix the line, or --set "
            "/task/on_bad_line=skip");
}

TEST_CASE("classification: named columns, JSON Lines, labels in the given order", "[tasks]") {
  const test::TemporaryFolder folder;
  test::write_text(folder / "train.jsonl",
                   "{\"q\": \"a\", \"p\": \"b\", \"answer\": true, \"key\": \"k1\"}\n"
                   "{\"q\": \"c\", \"p\": \"d\", \"answer\": false, \"key\": 2}\n"
                   "{\"q\": \"e\", \"p\": \"f\", \"answer\": null, \"key\": 3}\n");
  const auto task = test::task_of(
      R"({"name": "classification", "files": {"train": "train.jsonl"}, "labels": ["true", "false"],
          "columns": {"text": "q", "text_pair": "p", "label": "answer", "id": "key"}, "select_by": "f1"})",
      (folder / "r.json").string());
  CHECK(task.labels == Names{"true", "false"});
  CHECK(task.metrics == Names{"accuracy", "f1", "matthews"});
  CHECK(task.primary_metric == "f1");
  const auto data = task.load({});
  REQUIRE(data.train.examples.size() == 2);
  CHECK(data.train.examples[0].id == "k1");
  CHECK(data.train.examples[0].text_pair == "b");
  CHECK(data.train.examples[0].label == 0.0);
  CHECK(data.train.examples[1].id == "2");
  CHECK(data.train.examples[1].label == 1.0);
  CHECK(data.validation.empty());
}

TEST_CASE("classification: labels that are numbers keep their order and their meaning", "[tasks]") {
  const test::TemporaryFolder folder;
  std::string content = "text\tlabel\n";
  for (int i = 11; i >= 0; --i) content += fmt::format("t\t{}\n", i);
  test::write_text(folder / "train.tsv", content);
  const auto file = (folder / "r.json").string();
  const auto data = test::task_of(R"({"name": "classification", "files": {"train": "train.tsv"}})", file).load({});
  CHECK(data.labels.size() == 12);
  CHECK(data.labels[2] == "2");
  CHECK(data.metrics == Names{"accuracy"});
  CHECK(data.train.examples[0].label == 11.0);
  const auto by_matthews =
      test::task_of(R"({"name": "classification", "files": {"train": "train.tsv"}, "select_by": "matthews"})", file);
  CHECK(by_matthews.load({}).metrics == Names{"accuracy", "matthews"});
  const auto by_f1 =
      test::task_of(R"({"name": "classification", "files": {"train": "train.tsv"}, "metrics": ["f1"]})", file);
  CHECK(test::user_error([&] { by_f1.load({}); }) ==
        file + "#/task: f1 is that of the second of two classes, the task has 12; use accuracy or matthews");
}

TEST_CASE("mistakes in one's own task are named", "[tasks]") {
  const test::TemporaryFolder folder;
  const auto file = (folder / "r.json").string();
  const auto message = [&](const std::string& rest, const std::string& name = "classification") {
    const auto text =
        test::user_error([&] { test::task_of(fmt::format(R"({{"name": "{}", {}}})", name, rest), file).load({}); });
    return text.starts_with(folder.path().string()) ? text.substr(folder.path().string().size() + 1) : text;
  };
  const std::string files = R"("files": {"train": "train.tsv"})";
  CHECK(message(R"("max_length": 5)") ==
        "r.json#/task: \"files\" names neither a training nor a validation file; add {\"train\": ..., \"validation\": "
        "...}");
  CHECK(message(R"("files": {"validation": "dev.tsv"})") ==
        "r.json#/task: \"labels\" is missing; without a training file their names must be given");
  CHECK(message(R"("files": {"train": "train.xlsx"})") ==
        "r.json#/task: got \"" + (folder / "train.xlsx").string() +
            "\", expected a file that ends in .tsv, .csv or .jsonl, each also with .gz behind it");
  CHECK(message(files) == "train.tsv: no such file, plain or .gz; put it there, or name another in /task/files/train");
  CHECK(message(files + R"(, "labels": ["a", "a"])") ==
        "r.json#/task/labels: got [\"a\",\"a\"], expected at least two names, each once");
  CHECK(message(files + R"(, "metrics": ["acuracy"])") ==
        "r.json#/task/metrics: got [\"acuracy\"], no metric \"acuracy\" of this task, expected \"accuracy\", \"f1\" or "
        "\"matthews\"; did you mean \"accuracy\"?");
  CHECK(message(files + R"(, "metrics": ["accuracy"], "select_by": "f1")") ==
        "r.json#/task/select_by: got \"f1\", expected \"accuracy\"");
  CHECK(message(files + R"(, "metrics": ["accuracy"])", "regression") ==
        "r.json#/task/metrics: got [\"accuracy\"], no metric \"accuracy\" of this task, expected \"pearson\" or "
        "\"spearman\"");
  test::write_text(folder / "train.tsv", "text\tlabel\na\tx\nb\tx\n");
  CHECK(
      message(files) ==
      "train.tsv: found the one label \"x\" in the column \"label\", expected at least two labels; name the column in "
      "/task/columns/label, or the labels in /task/labels");
  test::write_text(folder / "train.tsv", "sentence\tlabel\na\tx\nb\ty\n");
  CHECK(message(files) == "train.tsv:1: no column \"text\"; the header has \"sentence\", \"label\"");
}

TEST_CASE("regression: any finite score", "[tasks]") {
  const test::TemporaryFolder folder;
  test::write_text(folder / "train.csv", "text,label\na,-1\nb,2.5e3\nc,\n");
  const auto task = test::task_of(R"({"name": "regression", "files": {"train": "train.csv"}, "select_by": "pearson"})",
                                  (folder / "r.json").string());
  CHECK(task.kind == tasks::Kind::kRegression);
  CHECK(task.metrics == Names{"pearson", "spearman"});
  CHECK(task.primary_metric == "pearson");
  const auto data = task.load({});
  REQUIRE(data.train.examples.size() == 2);
  CHECK(data.train.examples[0].label == -1.0);
  CHECK(data.train.examples[1].label == 2500.0);
  CHECK(data.metrics == task.metrics);
}

TEST_CASE("span corruption: a document per line", "[tasks]") {
  const test::TemporaryFolder folder;
  test::write_text(folder / "train.txt", "one document\r\n\r\n  \nanother\tone \"x\n\xFF\nlast");
  const auto section = R"({"name": "span_corruption", "files": {"train": "train.txt", "validation": "train.txt"},
                          "noise_density": 0.3, "on_bad_line": "skip"})";
  const auto task = test::task_of(section, (folder / "r.json").string());
  CHECK(task.kind == tasks::Kind::kSpanCorruption);
  CHECK(task.primary_metric == "loss");
  REQUIRE(task.span_corruption);
  CHECK(task.span_corruption->noise_density == 0.3);
  CHECK(task.span_corruption->mean_span_length == 3.0);
  const auto data = task.load({});
  REQUIRE(data.train.examples.size() == 3);
  CHECK(data.train.examples[1].text == "another\tone \"x");
  CHECK(data.train.examples[2].id == "2");
  CHECK_FALSE(data.train.examples[0].label);
  CHECK(data.skipped_lines == 2);
  const auto strict =
      test::task_of(R"({"name": "span_corruption", "files": {"train": "train.txt"}})", (folder / "r.json").string());
  CHECK(test::user_error([&] { strict.load({}); }) ==
        (folder / "train.txt").string() + ":5: invalid UTF-8; fix the line, or --set /task/on_bad_line=skip");
  CHECK(test::user_error([] {
          test::task_of(R"({"name": "span_corruption", "files": {"train": "t"}, "noise_density": 1.0})");
        }) == "r.json#/task/noise_density: got 1.0, expected more than 0 and less than 1");
}
