#include "tasks/labels.h"

#include "support/catch.h"
#include "support/paths.h"

using namespace mergex;
using Names = std::vector<std::string>;

TEST_CASE("a class is a name or a number of a name; -1 and nothing are no label", "[tasks]") {
  const Names names{"entailment", "neutral", "contradiction"};
  CHECK(tasks::class_label("neutral", names).value == 1.0);
  CHECK(tasks::class_label("2", names).value == 2.0);
  for (const std::string_view none : {"", "-1"}) {
    CHECK_FALSE(tasks::class_label(none, names).value);
    CHECK(tasks::class_label(none, names).problem.empty());
  }
  CHECK(tasks::class_label("-", names, "-").problem.empty());
  CHECK(tasks::class_label("-", names).problem ==
        "found label \"-\", expected \"entailment\", \"neutral\" or \"contradiction\" (or 0..2)");
  CHECK(tasks::class_label("3", names).problem ==
        "found label \"3\", expected \"entailment\", \"neutral\" or \"contradiction\" (or 0..2)");
  CHECK(tasks::class_label("Neutral", names).problem.ends_with("; did you mean \"neutral\"?"));
  for (const std::string_view odd : {"1.0", " 1", "1 ", "+1", "0x1", "-2", "99999999999999999999"}) {
    CAPTURE(odd);
    CHECK_FALSE(tasks::class_label(odd, names).problem.empty());
  }
}

TEST_CASE("labels that are numbers are names, never places", "[tasks]") {
  const Names stars{"1", "2", "3"};
  CHECK(tasks::class_label("1", stars).value == 0.0);
  CHECK(tasks::class_label("0", stars).problem == "found label \"0\", expected \"1\", \"2\" or \"3\"");
  const Names signs{"-1", "0", "1"};
  CHECK(tasks::class_label("-1", signs).value == 0.0);
}

TEST_CASE("a long label is cut between characters", "[tasks]") {
  std::string label(59, 'x');
  label += "\xC3\xA9\xC3\xA9";
  CHECK(tasks::class_label(label, Names{"a", "b"})
            .problem.starts_with("found label \"" + std::string(59, 'x') + "...\""));
}

TEST_CASE("a score is a finite number in its range", "[tasks]") {
  CHECK(tasks::score_label("3.800").value == 3.8);
  CHECK(tasks::score_label("-1").value == -1.0);
  CHECK_FALSE(tasks::score_label("-1", {.at_least = 0.0, .at_most = 5.0}, -1.0).value);
  CHECK(tasks::score_label("-1.000", {.at_least = 0.0, .at_most = 5.0}, -1.0).problem.empty());
  CHECK_FALSE(tasks::score_label("").value);
  CHECK(tasks::score_label("5.2", {.at_least = 0.0, .at_most = 5.0}).problem == "found score 5.2, expected 0..5");
  for (const std::string_view odd : {"nan", "inf", "x", "1,5", "1 "}) {
    CHECK(tasks::score_label(odd).problem == "found score \"" + std::string(odd) + "\", expected a number");
  }
}

TEST_CASE("distinct labels are ordered as numbers or as text", "[tasks]") {
  CHECK(tasks::distinct_labels({"10", "2", "0", "2"}) == Names{"0", "2", "10"});
  CHECK(tasks::distinct_labels({"b", "10", "2", "b"}) == Names{"10", "2", "b"});
  CHECK(tasks::distinct_labels({}).empty());
}

TEST_CASE("a checkpoint's labels are matched by name, not by place (E7)", "[tasks]") {
  const Names task{"entailment", "neutral", "contradiction"};
  const auto matched = [&](const Names& checkpoint) { return tasks::match_labels(task, checkpoint, "ckpt"); };
  using Order = std::vector<std::size_t>;
  CHECK(matched(task) == Order{0, 1, 2});
  CHECK(matched({"CONTRADICTION", "NEUTRAL", "ENTAILMENT"}) == Order{2, 1, 0});
  CHECK(matched({"contradiction", "entailment", "neutral"}) == Order{1, 2, 0});
  CHECK(matched({"LABEL_0", "LABEL_1", "LABEL_2"}) == Order{0, 1, 2});
  CHECK(tasks::match_labels(Names{"entailment", "not_entailment"}, Names{"not entailment", "Entailment"}, "ckpt") ==
        Order{1, 0});
  CHECK(
      test::user_error([&] {
        matched({"entailment", "not_entailment"});
      }) ==
      "ckpt: the head's labels are \"entailment\" or \"not_entailment\", the task's are \"entailment\", \"neutral\" or "
      "\"contradiction\"; use a checkpoint of this task, or train a new head");
  CHECK_FALSE(test::user_error([&] { matched({"entailment", "neutral", "neutral"}); }).empty());
  CHECK_FALSE(test::user_error([&] { matched({"LABEL_0", "LABEL_2", "LABEL_1"}); }).empty());
}
