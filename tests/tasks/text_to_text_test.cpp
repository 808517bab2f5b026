#include "tasks/text_to_text.h"

#include <fmt/format.h>

#include <map>

#include "support/catch.h"
#include "support/paths.h"
#include "tasks/task_section.h"

using namespace mergex;
using Names = std::vector<std::string>;

TEST_CASE("text to text: every GLUE task's input and answer", "[tasks]") {
  struct Case {
    std::string name, table, input, target;
  };
  // The keys of each task's texts in the order of their names: MNLI's hypothesis comes first.
  const std::vector<Case> cases{
      {"cola", "sentence\tlabel\nA b.\t0\n", "cola sentence: A b.", "unacceptable"},
      {"sst2", "sentence\tlabel\nA b.\t1\n", "sst2 sentence: A b.", "positive"},
      {"mrpc", "sentence1\tsentence2\tlabel\nA\tB\t1\n", "mrpc sentence1: A sentence2: B", "equivalent"},
      {"stsb", "sentence1\tsentence2\tscore\nA\tB\t2.5\n", "stsb sentence1: A sentence2: B", "2.4"},
      {"qqp", "question1\tquestion2\tis_duplicate\nA\tB\t0\n", "qqp question1: A question2: B", "not_duplicate"},
      {"mnli", "sentence1\tsentence2\tgold_label\nA\tB\tneutral\n", "mnli hypothesis: B premise: A", "neutral"},
      {"qnli", "question\tsentence\tlabel\nA\tB\tentailment\n", "qnli question: A sentence: B", "entailment"},
      {"rte", "sentence1\tsentence2\tlabel\nA\tB\t1\n", "rte sentence1: A sentence2: B", "not_entailment"},
      {"wnli", "sentence1\tsentence2\tlabel\nA\tB\t1\n", "wnli sentence1: A sentence2: B", "entailment"}};
  for (const auto& c : cases) {
    CAPTURE(c.name);
    const test::TemporaryFolder folder;
    const auto file = test::write_text(folder / "t.tsv", c.table).string();
    const auto section = [&](const char* format) {
      return fmt::format(R"({{"name": "glue/{}", "files": {{"train": "{}", "validation": "{}"}}, "format": "{}"}})",
                         c.name, file, file, format);
    };
    const auto task = test::task_of(section("text_to_text"));
    CHECK(task.is_sequence_to_sequence());
    const auto data = task.load({});
    CHECK(data.train.examples.at(0).text == c.input);
    CHECK_FALSE(data.train.examples.at(0).text_pair);
    CHECK(data.train.examples.at(0).target == c.target);
    CHECK(data.train.examples.at(0).label == tasks::parse_target(c.target, data.labels).value() + (c.name == "stsb" ? 0.1 : 0.0));
    const auto plain = test::task_of(section("plain"));
    CHECK_FALSE(plain.is_sequence_to_sequence());
    CHECK(plain.load({}).train.examples.at(0).text == (c.input.find("A b.") != std::string::npos ? "A b." : "A"));
    CHECK_FALSE(plain.load({}).train.examples.at(0).target);
  }
  CHECK(test::user_error([] { test::task_of(R"({"name": "glue/rte", "data_dir": "d", "format": "texts"})"); })
            .starts_with("r.json#/task/format: got \"texts\", expected"));
}

TEST_CASE("an example without a label has no answer", "[tasks]") {
  const test::TemporaryFolder folder;
  test::write_text(folder / "train.tsv", "sentence\tlabel\na\t1\n");
  test::write_text(folder / "dev.tsv", "sentence\tlabel\na\t1\nb\t-1\n");
  const auto data = test::task_of(fmt::format(R"({{"name": "glue/sst2", "data_dir": "{}", "format": "text_to_text"}})",
                                              folder.path().string()))
                        .load({});
  CHECK(data.validation.at(0).examples.at(1).text == "sst2 sentence: b");
  CHECK_FALSE(data.validation.at(0).examples.at(1).target);
}

TEST_CASE("STS-B's scores round to fifths in float32, halves to even", "[tasks][golden]") {
  // numpy 2: "%.1f" % (round(float32(x) * float32(5)) / float32(5))
  const std::vector<std::pair<double, const char*>> golden{
      {0.0, "0.0"}, {0.1, "0.0"}, {0.3, "0.4"}, {0.5, "0.4"}, {0.7, "0.8"}, {0.9, "0.8"}, {1.1, "1.2"}, {1.3, "1.2"},
      {1.5, "1.6"}, {1.7, "1.6"}, {1.9, "2.0"}, {2.1, "2.0"}, {2.3, "2.4"}, {2.5, "2.4"}, {2.7, "2.8"}, {2.9, "2.8"},
      {3.1, "3.2"}, {3.3, "3.2"}, {3.5, "3.6"}, {3.7, "3.6"}, {3.9, "4.0"}, {4.1, "4.0"}, {4.3, "4.4"}, {4.5, "4.4"},
      {4.7, "4.8"}, {4.9, "4.8"}, {5.0, "5.0"}, {0.063, "0.0"}, {1.273, "1.2"}, {2.533, "2.6"}, {3.909, "4.0"},
      {4.091, "4.0"}, {4.75, "4.8"}};
  for (const auto& [score, text] : golden) {
    CAPTURE(score);
    CHECK(tasks::target_text(score, {}) == text);
  }
}

TEST_CASE("answers name a class exactly, or are a finite number", "[tasks]") {
  const Names labels{"entailment", "not_entailment"};
  CHECK(tasks::parse_target("not_entailment", labels) == 1.0);
  for (const auto* text : {"", "Entailment", "entailment ", "not", "entailment entailment", "0"}) {
    CHECK_FALSE(tasks::parse_target(text, labels));
  }
  CHECK(tasks::parse_target("3.8", {}) == 3.8);
  CHECK(tasks::parse_target(" -7 ", {}) == -7.0);
  for (const auto* text : {"", " ", "3.8.", "three", "nan", "inf", "3,8", "1e999"}) CHECK_FALSE(tasks::parse_target(text, {}));
  const auto targets = tasks::possible_targets({});
  CHECK(targets.size() == 26);
  CHECK(targets.front() == "0.0");
  CHECK(targets[12] == "2.4");
  CHECK(targets.back() == "5.0");
}
