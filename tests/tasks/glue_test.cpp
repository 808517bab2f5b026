#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <map>

#include "io/atomic_file.h"
#include "support/catch.h"
#include "support/paths.h"
#include "tasks/task_section.h"

using namespace mergex;
using tasks::Data;
using tasks::Example;
using tasks::Split;
namespace fs = std::filesystem;

namespace {

tasks::Task glue(const std::string& name, const fs::path& data_dir, const std::string& more = "") {
  return test::task_of(fmt::format(R"({{"name": "glue/{}", "data_dir": "{}"{}}})", name, data_dir.string(), more));
}

constexpr tasks::Wanted kAll{.train = true, .validation = true, .test = true};

/// Writes train.tsv and dev.tsv, the same in both, and reads the task.
Data load_both(const std::string& name, const std::string& content, const std::string& more = "") {
  const test::TemporaryFolder folder;
  test::write_text(folder / "train.tsv", content);
  test::write_text(folder / "dev.tsv", content);
  return glue(name, folder.path(), more).load({});
}

std::string error_of(const std::string& name, const std::string& content) {
  const test::TemporaryFolder folder;
  const auto train = test::write_text(folder / "train.tsv", content);
  const auto message = test::user_error([&] { glue(name, folder.path()).load({.validation = false}); });
  REQUIRE(message.starts_with(train.string()));
  return message.substr(train.string().size());
}

void check(const Example& example, const std::string& id, const std::string& text, std::optional<std::string> text_pair,
           std::optional<double> label) {
  CHECK(example.id == id);
  CHECK(example.text == text);
  CHECK(example.text_pair == text_pair);
  CHECK(example.label == label);
}

std::map<double, int> label_counts(const std::vector<Example>& examples) {
  std::map<double, int> counts;
  for (const auto& example : examples) ++counts[example.label.value_or(-1)];
  return counts;
}

}  // namespace

TEST_CASE("GLUE tasks: kinds, label order and metrics", "[tasks]") {
  struct Expected {
    std::string labels, metrics, primary;
  };
  const std::map<std::string, Expected> expected{{"cola", {"unacceptable acceptable", "matthews accuracy", "matthews"}},
                                                 {"sst2", {"negative positive", "accuracy", "accuracy"}},
                                                 {"mrpc", {"not_equivalent equivalent", "accuracy f1", "f1"}},
                                                 {"stsb", {"", "pearson spearman", "spearman"}},
                                                 {"qqp", {"not_duplicate duplicate", "accuracy f1", "f1"}},
                                                 {"mnli", {"entailment neutral contradiction", "accuracy", "accuracy"}},
                                                 {"qnli", {"entailment not_entailment", "accuracy", "accuracy"}},
                                                 {"rte", {"entailment not_entailment", "accuracy", "accuracy"}},
                                                 {"wnli", {"not_entailment entailment", "accuracy", "accuracy"}}};
  for (const auto& [name, what] : expected) {
    CAPTURE(name);
    const auto task = glue(name, "d");
    CHECK(fmt::format("{}", fmt::join(task.labels, " ")) == what.labels);
    CHECK(fmt::format("{}", fmt::join(task.metrics, " ")) == what.metrics);
    CHECK(task.primary_metric == what.primary);
    CHECK((task.kind == tasks::Kind::kRegression) == (name == "stsb"));
  }
}

TEST_CASE("SST-2: sentence and label; a test file without labels", "[tasks]") {
  const test::TemporaryFolder folder;
  test::write_text(folder / "train.tsv", "sentence\tlabel\nit 's a charm \t1\n\"bleak \t0\n");
  test::write_text(folder / "dev.tsv", "sentence\tlabel\r\ngood\t1\r\n");
  test::write_text(folder / "test.tsv", "index\tsentence\n7\tuneasy mishmash .\n");
  const auto data = glue("sst2", folder.path()).load(kAll);
  REQUIRE(data.train.examples.size() == 2);
  check(data.train.examples[0], "0", "it 's a charm ", std::nullopt, 1.0);
  check(data.train.examples[1], "1", "\"bleak ", std::nullopt, 0.0);
  CHECK(data.train.name == "train");
  REQUIRE(data.validation.size() == 1);
  CHECK(data.validation[0].name == "validation");
  check(data.validation[0].examples.at(0), "0", "good", std::nullopt, 1.0);
  REQUIRE(data.test);
  CHECK(data.test->name == "test");
  check(data.test->examples.at(0), "7", "uneasy mishmash .", std::nullopt, std::nullopt);
  CHECK(data.files == std::vector{folder / "train.tsv", folder / "dev.tsv", folder / "test.tsv"});
  CHECK(data.labels == std::vector<std::string>{"negative", "positive"});
  CHECK(data.skipped_lines == 0);
  CHECK_FALSE(glue("sst2", folder.path()).load({}).test);
}

TEST_CASE("CoLA: four columns without a header, the test file with one", "[tasks]") {
  const test::TemporaryFolder folder;
  test::write_text(folder / "train.tsv", "gj04\t1\t\tOur friends won't buy this.\nks08\t0\t*\tThe more \"we\" read.\n");
  test::write_text(folder / "dev.tsv", "gj04\t1\t\tThe sailors rode.\n");
  test::write_text(folder / "test.tsv", "index\tsentence\n0\tBill whistled past the house.\n");
  const auto data = glue("cola", folder.path()).load(kAll);
  check(data.train.examples.at(0), "0", "Our friends won't buy this.", std::nullopt, 1.0);
  check(data.train.examples.at(1), "1", "The more \"we\" read.", std::nullopt, 0.0);
  check(data.validation.at(0).examples.at(0), "0", "The sailors rode.", std::nullopt, 1.0);
  check(data.test.value().examples.at(0), "0", "Bill whistled past the house.", std::nullopt, std::nullopt);
  CHECK(error_of("cola", "gj04\t1\t\tA.\ngj04\t1\tB.\n") ==
        ":2: found 3 columns, expected 4; fix the line, or --set /task/on_bad_line=skip");
}

TEST_CASE("MRPC: a byte order mark, unpaired quotes, ids that are not the row's", "[tasks]") {
  const test::TemporaryFolder folder;
  const std::string header = "\xEF\xBB\xBFQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n";
  const auto content = header + "1\t702876\t702977\tHe said \"no\".\t\"It does not fit.\r\n0\t1\t2\t\"Open\tShut\"\r\n";
  const auto data = load_both("mrpc", content);
  REQUIRE(data.train.examples.size() == 2);
  check(data.train.examples[0], "0", "He said \"no\".", "\"It does not fit.", 1.0);
  check(data.train.examples[1], "1", "\"Open", "Shut\"", 0.0);
  test::write_text(folder / "train.tsv", content);
  test::write_text(folder / "dev.tsv", content);
  test::write_text(folder / "test.tsv", "\xEF\xBB\xBFindex\t#1 ID\t#2 ID\t#1 String\t#2 String\n5\t1\t2\ta\tb\n");
  check(glue("mrpc", folder.path()).load(kAll).test.value().examples.at(0), "5", "a", "b", std::nullopt);
}

TEST_CASE("STS-B: scores from 0 to 5", "[tasks]") {
  const std::string header = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n";
  const std::string front = "3\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\t";
  const auto data = load_both("stsb", header + front + "A plane.\tAn air plane.\t4.750\n" + front + "a\tb\t-1\n");
  REQUIRE(data.train.examples.size() == 1);
  check(data.train.examples[0], "3", "A plane.", "An air plane.", 4.75);
  REQUIRE(data.validation[0].examples.size() == 2);
  check(data.validation[0].examples[1], "3", "a", "b", std::nullopt);
  CHECK(error_of("stsb", header + front + "a\tb\t5.5\n") ==
        ":2: found score 5.5, expected 0..5; fix the line, or --set /task/on_bad_line=skip");
  CHECK(error_of("stsb", header + front + "a\tb\thigh\n") ==
        ":2: found score \"high\", expected a number; fix the line, or --set /task/on_bad_line=skip");
}

TEST_CASE("QQP: both layouts, and the official malformed lines", "[tasks]") {
  const std::string header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n";
  const auto content =
      header + "133273\t213221\t213222\tHow?\tHow so?\t1\n402555\t536040\t536041\thow\n9\t1\t2\ta\tb\t0\n";
  CHECK(error_of("qqp", content) ==
        ":3: found 4 columns, expected 6 as in the header; fix the line, or --set /task/on_bad_line=skip");
  const auto data = load_both("qqp", content, R"(, "on_bad_line": "skip")");
  REQUIRE(data.train.examples.size() == 2);
  CHECK(data.skipped_lines == 2);  // one in each of the two files
  check(data.train.examples[0], "133273", "How?", "How so?", 1.0);
  check(data.train.examples[1], "9", "a", "b", 0.0);
  const auto short_form = load_both("qqp", "index\tquestion1\tquestion2\tis_duplicate\n4\ta\tb\t1\n");
  check(short_form.train.examples.at(0), "4", "a", "b", 1.0);
}

TEST_CASE("QNLI, RTE and WNLI: names or numbers", "[tasks]") {
  const auto qnli = load_both("qnli", "index\tquestion\tsentence\tlabel\n0\tq\ts\tnot_entailment\n1\tq2\ts2\t0\n");
  check(qnli.train.examples.at(0), "0", "q", "s", 1.0);
  check(qnli.train.examples.at(1), "1", "q2", "s2", 0.0);
  const auto rte = load_both("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n1\tc\td\t1\n");
  check(rte.train.examples.at(0), "0", "a", "b", 0.0);
  check(rte.train.examples.at(1), "1", "c", "d", 1.0);
  const auto wnli = load_both("wnli", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t0\n1\tc\td\tentailment\n");
  check(wnli.train.examples.at(0), "0", "a", "b", 0.0);
  check(wnli.train.examples.at(1), "1", "c", "d", 1.0);
  CHECK(error_of("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailmnet\n") ==
        ":2: found label \"entailmnet\", expected \"entailment\" or \"not_entailment\" (or 0..1); did you mean "
        "\"entailment\"?; fix the line, or --set /task/on_bad_line=skip");
}

TEST_CASE("MNLI: official columns by name, matched and mismatched, no agreement is no label", "[tasks]") {
  const test::TemporaryFolder folder;
  const std::string front =
      "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
      "sentence2_parse\tsentence1\tsentence2\tlabel1\t";
  const auto row = [](int index, const std::string& labels) {
    return fmt::format("{}\t31193\t31193n\tgovernment\t( a )\t( b )\t(ROOT)\t(ROOT)\tpremise {}\thypothesis\t{}\n",
                       index, index, labels);
  };
  test::write_text(folder / "train.tsv", front + "gold_label\n" + row(0, "neutral\tneutral") +
                                             row(1, "entailment\tcontradiction") + row(2, "neutral\t-"));
  const auto dev_header = front + "label2\tlabel3\tlabel4\tlabel5\tgold_label\n";
  test::write_text(folder / "dev_matched.tsv",
                   dev_header + row(0, "neutral\tneutral\tneutral\tentailment\tneutral\tentailment") +
                       row(1, "neutral\tentailment\tcontradiction\tentailment\tneutral\t-"));
  const auto matched_only = glue("mnli", folder.path()).load({});  // warns
  CHECK(matched_only.validation.size() == 1);
  test::write_text(folder / "dev_mismatched.tsv", dev_header + row(0, "a\tb\tc\td\te\tcontradiction"));
  test::write_text(folder / "test_matched.tsv", "index\tsentence1\tsentence2\n9\tp\th\n");
  const auto data = glue("mnli", folder.path()).load(kAll);

  REQUIRE(data.train.examples.size() == 2);  // the row without a label is not trained on
  check(data.train.examples[0], "0", "premise 0", "hypothesis", 1.0);
  check(data.train.examples[1], "1", "premise 1", "hypothesis", 2.0);
  REQUIRE(data.validation.size() == 2);
  CHECK(data.validation[0].name == "validation_matched");
  CHECK(data.validation[1].name == "validation_mismatched");
  REQUIRE(data.validation[0].examples.size() == 2);
  check(data.validation[0].examples[0], "0", "premise 0", "hypothesis", 0.0);
  check(data.validation[0].examples[1], "1", "premise 1", "hypothesis", std::nullopt);
  check(data.validation[1].examples.at(0), "0", "premise 0", "hypothesis", 2.0);
  check(data.test.value().examples.at(0), "9", "p", "h", std::nullopt);
}

TEST_CASE("a row labelled -1 has no label and is never trained on (E16)", "[tasks]") {
  const auto data = load_both("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t-1\n1\tc\td\t0\n2\te\tf\t\n");
  REQUIRE(data.train.examples.size() == 1);
  CHECK(data.train.examples[0].id == "1");
  REQUIRE(data.validation[0].examples.size() == 3);
  CHECK_FALSE(data.validation[0].examples[0].label);
  CHECK(data.validation[0].examples[1].label == 0.0);
  CHECK_FALSE(data.validation[0].examples[2].label);
  CHECK(error_of("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t-1\n") ==
        ": none of its 1 examples has a label, nothing to train on; is this the test file?");
  CHECK(error_of("rte", "index\tsentence1\tsentence2\n0\ta\tb\n") ==
        ": none of its 1 examples has a label, nothing to train on; is this the test file?");
  CHECK(error_of("rte", "index\tsentence1\tsentence2\tlabel\n") == ": holds no examples, nothing to train on");
}

TEST_CASE("files are found plain or compressed, or under other names", "[tasks]") {
  const test::TemporaryFolder folder;
  test::write_text(folder / "train.tsv", "sentence\tlabel\na\t1\n");
  CHECK(test::user_error([&] { glue("sst2", folder.path()).load({}); }) ==
        (folder / "dev.tsv").string() +
            ": no such file, plain or .gz; put it there, or name another in /task/files/validation");
  gzFile file = gzopen((folder / "dev.tsv.gz").c_str(), "wb");
  gzputs(file, "sentence\tlabel\nzipped\t0\n");
  gzclose(file);
  CHECK(glue("sst2", folder.path()).load({}).validation[0].examples.at(0).text == "zipped");

  test::write_text(folder / "mine.jsonl", "{\"sentence\": \"x\", \"label\": 1, \"idx\": 8}\n");
  const auto resolved = std::make_shared<io::Json>();
  const auto data = test::task_of(R"({"name": "glue/sst2", "data_dir": ".",
                                      "files": {"validation": ["train.tsv", "mine.jsonl"]}})",
                                  (folder / "r.json").string(), resolved)
                        .load({});
  CHECK((*resolved)["task"]["files"]["validation"][1] == (folder / "mine.jsonl").string());
  REQUIRE(data.validation.size() == 2);
  CHECK(data.validation[1].name == "validation_2");
  check(data.validation[1].examples.at(0), "8", "x", std::nullopt, 1.0);

  const auto lone = test::task_of(
      fmt::format(R"({{"name": "glue/sst2", "files": {{"validation": "{}"}}}})", (folder / "train.tsv").string()));
  CHECK(lone.load({.train = false}).validation.size() == 1);
  CHECK(test::user_error([&] { lone.load({}); }) ==
        "r.json#/task: names no training file; add it as /task/files/train");
}

TEST_CASE("a missing column is named", "[tasks]") {
  CHECK(error_of("mnli", "index\tsentence1\tsentence\tlabel\n0\ta\tb\t0\n") ==
        ":1: no column \"sentence2\" or \"hypothesis\"; the header has \"index\", \"sentence1\", \"sentence\", "
        "\"label\"");
}

TEST_CASE("the real GLUE files have the known numbers of examples and labels", "[tasks]") {
  struct Known {
    std::string task, file;
    std::map<double, int> labels;  // -1: none
  };
  const std::vector<Known> known{{"sst2", "SST-2/train.tsv.gz", {{0, 29780}, {1, 37569}}},
                                 {"sst2", "SST-2/dev.tsv", {{0, 428}, {1, 444}}},
                                 {"cola", "CoLA/train.tsv", {{0, 2528}, {1, 6023}}},
                                 {"cola", "CoLA/dev.tsv", {{0, 322}, {1, 721}}},
                                 {"mrpc", "MRPC/train.tsv", {{0, 1194}, {1, 2474}}},
                                 {"mrpc", "MRPC/dev.tsv", {{0, 129}, {1, 279}}},
                                 {"mrpc", "MRPC/test_labelled.tsv", {{0, 578}, {1, 1147}}},
                                 {"qqp", "QQP/dev_first1001.tsv", {{0, 673}, {1, 328}}},
                                 {"qqp", "QQP/dev_sample7600.tsv.gz", {{0, 4871}, {1, 2729}}},
                                 {"qqp", "QQP/train_sample23496.tsv.gz", {{0, 14749}, {1, 8747}}},
                                 {"qnli", "QNLI/dev.tsv.gz", {{0, 2702}, {1, 2761}}},
                                 {"qnli", "QNLI/test.tsv.gz", {{-1, 5463}}},
                                 {"rte", "RTE/train.tsv", {{0, 1249}, {1, 1241}}},
                                 {"rte", "RTE/dev.tsv", {{0, 146}, {1, 131}}},
                                 {"rte", "RTE/test.tsv.gz", {{-1, 3000}}},
                                 {"wnli", "WNLI/train.tsv", {{0, 323}, {1, 312}}},
                                 {"wnli", "WNLI/dev.tsv", {{0, 40}, {1, 31}}},
                                 {"mnli", "MNLI/train_sample3000.tsv", {{0, 995}, {1, 995}, {2, 1010}}},
                                 {"mnli", "MNLI/dev_matched_first1001.tsv", {{0, 342}, {1, 319}, {2, 340}}},
                                 {"mnli", "MNLI/dev_sample7469.tsv.gz", {{0, 2681}, {1, 2353}, {2, 2435}}}};
  for (const auto& [name, file, labels] : known) {
    CAPTURE(file);
    const auto path = test::data_path("glue/" + file);
    if (!path) continue;
    const auto task = test::task_of(
        fmt::format(R"({{"name": "glue/{0}", "files": {{"train": "{1}", "test": "{1}"}}}})", name, path->string()));
    CHECK(label_counts(task.load({.train = false, .test = true}).test.value().examples) == labels);
  }
}

TEST_CASE("the real STS-B scores have the known mean", "[tasks]") {
  for (const auto& [file, count, sum] : {std::tuple{"train.tsv", 5749u, 15528.0}, {"dev.tsv", 1500u, 3545.86}}) {
    const auto path = test::data_path(std::string("glue/STS-B/") + file);
    if (!path) return;
    const auto task =
        test::task_of(fmt::format(R"({{"name": "glue/stsb", "files": {{"train": "{}"}}}})", path->string()));
    const auto data = task.load({.validation = false});
    CHECK(data.train.examples.size() == count);
    double total = 0;
    for (const auto& example : data.train.examples) total += *example.label;
    CHECK(total == Approx(sum).epsilon(1e-5));
  }
}

TEST_CASE("real archives load from their folders", "[tasks]") {
  const auto rte = test::data_path("glue/RTE");
  if (!rte) return;
  const auto data = glue("rte", *rte).load(kAll);
  CHECK(data.train.examples.size() == 2490);
  CHECK(data.validation.at(0).examples.size() == 277);
  CHECK(data.test.value().examples.size() == 3000);
  check(data.validation[0].examples[1], "1",
        "Yet, we now are discovering that antibiotics are losing their effectiveness against illness. Disease-causing "
        "bacteria are mutating faster than we can come up with new antibiotics to fight the new variations.",
        "Bacteria is winning the war against antibiotics.", 0.0);
  const auto stsb = test::data_path("glue/STS-B");
  if (!stsb) return;
  const auto scores = glue("stsb", *stsb).load(kAll);
  CHECK(scores.test.value().examples.size() == 1379);
  CHECK_FALSE(scores.test->examples[0].label);
}
