#include "tasks/registry.h"

#include <algorithm>
#include <set>

#include "support/catch.h"
#include "support/paths.h"
#include "tasks/task_section.h"

using namespace mergex;

TEST_CASE("tasks have unique snake_case names, a summary and a source", "[tasks]") {
  std::set<std::string_view> names;
  for (const auto* entry : tasks::registry()) {
    CAPTURE(entry->name);
    CHECK(names.insert(entry->name).second);
    CHECK(std::ranges::all_of(
        entry->name, [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '/'; }));
    CHECK_FALSE(entry->summary.empty());
    CHECK_FALSE(entry->source.empty());
    CHECK(entry->configure != nullptr);
    CHECK(test::is_documented(std::string(entry->name)));
  }
  CHECK(names.size() == 12);
}

TEST_CASE("every task's options are read from its section, defaults included", "[tasks]") {
  for (const auto* entry : tasks::registry()) {
    CAPTURE(entry->name);
    const bool glue = entry->name.starts_with("glue/");
    const auto given = glue ? R"("data_dir": "d")" : R"("files": {"train": "train.tsv"})";
    const auto resolved = std::make_shared<io::Json>();
    const auto task = test::task_of(fmt::format(R"({{"name": "{}", {}}})", entry->name, given), "/r/r.json", resolved);
    CHECK(task.name == entry->name);
    CHECK(std::ranges::count(task.metrics, task.primary_metric) == 1);
    CHECK(task.load != nullptr);
    CHECK(task.max_length == (entry->name == "span_corruption" ? 512 : 128));
    const auto& section = (*resolved)["task"];
    CHECK(section["on_bad_line"] == "error");
    CHECK(section["max_length"] == task.max_length);
    if (glue) CHECK(section["data_dir"] == "/r/d");

    // What was resolved reads again, to the same.
    const auto again = std::make_shared<io::Json>();
    test::task_of(section.dump(), "elsewhere.json", again);
    CHECK((*again)["task"] == section);
  }
}

TEST_CASE("an unknown task or option is answered with the nearest", "[tasks]") {
  CHECK(test::user_error([] { test::task_of(R"({"name": "glue/sts2"})"); }) ==
        "r.json#/task/name: got \"glue/sts2\", no such task; did you mean \"glue/sst2\"? (mergex finetune --list)");
  CHECK(test::user_error([] { test::task_of(R"({"max_length": 3})"); }) == "r.json#/task: \"name\" is missing; add it");
  CHECK(test::user_error([] { test::task_of(R"({"name": "glue/sst2", "data_dir": "d", "max_lenght": 3})"); }) ==
        "r.json#/task: unknown key \"max_lenght\"; did you mean \"max_length\"?");
  CHECK(test::user_error([] { test::task_of(R"({"name": "glue/sst2", "data_dir": "d", "files": {"dev": "x"}})"); }) ==
        "r.json#/task/files: unknown key \"dev\"");
  CHECK(test::user_error([] { test::task_of(R"({"name": "glue/sst2", "data_dir": "d", "max_length": 1})"); }) ==
        "r.json#/task/max_length: got 1, expected at least 2");
  CHECK(test::user_error([] { test::task_of(R"({"name": "glue/sst2", "data_dir": "d", "on_bad_line": "ignore"})"); }) ==
        "r.json#/task/on_bad_line: got \"ignore\", expected \"error\" or \"skip\"");
  CHECK(
      test::user_error([] { test::task_of(R"({"name": "glue/sst2"})"); }) ==
      "r.json#/task: \"data_dir\" is missing; add the folder that holds train.tsv and dev.tsv, or name the \"files\"");
}
