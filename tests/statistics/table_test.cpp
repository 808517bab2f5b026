#include "statistics/table.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "statistics/summary.h"
#include "statistics/utf8.h"
#include "support/catch.h"

using namespace mergex::statistics;

namespace {

Table example() {
  Table table({{.header = "method"},
               {.header = "accuracy", .align = Align::right},
               {.header = "n", .align = Align::center}});
  table.add_row({"dense", mean_deviation({.n = 3, .mean = 86.312, .deviation = 0.4249}, 2), number(3.0, 0)});
  table.add_row({"a|b, \"π\"", number(7.0, 2), std::nullopt});
  return table;
}

}  // namespace

TEST_CASE("a summary has the sample deviation, and one run has none", "[statistics]") {
  const auto three = summarize(std::vector<double>{1.0, 2.0, 6.0});
  CHECK(three.n == 3);
  CHECK(three.mean == 3.0);
  CHECK(three.deviation.value() == Approx(std::sqrt(7.0)).epsilon(1e-15));
  const auto one = summarize(std::vector<double>{0.1});
  CHECK(one.mean == 0.1);
  CHECK_FALSE(one.deviation.has_value());
  CHECK_THROWS_AS(summarize(std::vector<double>{}), std::invalid_argument);
  CHECK_THROWS_AS(summarize(std::vector<double>{1.0, std::nan("")}), std::invalid_argument);
}

TEST_CASE("a summary keeps equal values and large offsets exact", "[statistics][law]") {
  const double value = GENERATE(0.1, -3.3, 1e15 + 0.3, 1e-300);
  const auto equal = summarize(std::vector<double>(7, value));
  CHECK(equal.mean == value);
  CHECK(equal.deviation == 0.0);
  const double offset = GENERATE(0.0, 1e6, 1e12);
  const auto shifted = summarize(std::vector<double>{offset + 1, offset + 2, offset + 3, offset + 4});
  CHECK(shifted.mean == offset + 2.5);
  CHECK(shifted.deviation.value() == Approx(std::sqrt(5.0 / 3.0)).epsilon(1e-14));
}

TEST_CASE("cells are written as people read them", "[statistics]") {
  CHECK(number(86.315, 1) == "86.3");
  CHECK(number(-0.0001, 2) == "0.00");
  CHECK(number(-0.01, 2) == "-0.01");
  CHECK(number(std::nan(""), 2) == "nan");
  CHECK(number(-std::numeric_limits<double>::infinity(), 2) == "-inf");
  CHECK(number(std::optional<double>{}, 2) == std::nullopt);
  CHECK(mean_deviation({.n = 3, .mean = 86.312, .deviation = 0.4249}, 2) == "86.31 ± 0.42");
  CHECK(mean_deviation({.n = 1, .mean = 86.312}, 2) == "86.31");
  CHECK(number(Score{.metric = "matthews", .value = 0.0, .defined = false}, 2) == "undefined");
  CHECK(number(Score{.metric = "matthews", .value = 0.5}, 2) == "0.50");
}

TEST_CASE("a table as markdown, CSV and in the terminal", "[statistics]") {
  CHECK(example().markdown() ==
        "| method    |     accuracy |  n  |\n"
        "| :-------- | -----------: | :-: |\n"
        "| dense     | 86.31 ± 0.42 |  3  |\n"
        "| a\\|b, \"π\" |         7.00 |  -  |\n");
  CHECK(example().csv() ==
        "method,accuracy,n\n"
        "dense,86.31 ± 0.42,3\n"
        "\"a|b, \"\"π\"\"\",7.00,\n");
  CHECK(example().terminal() ==
        "method        accuracy  n\n"
        "────────  ────────────  ─\n"
        "dense     86.31 ± 0.42  3\n"
        "a|b, \"π\"          7.00  -\n");
}

TEST_CASE("tables of nothing, of one column and of line breaks", "[statistics]") {
  Table table({{.header = "only"}});
  CHECK(table.markdown() == "| only |\n| :--- |\n");
  CHECK(table.csv() == "only\n");
  CHECK(table.terminal() == "only\n────\n");
  table.add_row({std::nullopt});
  table.add_row({"two\nlines"});
  CHECK(table.csv() == "only\n\"\"\n\"two\nlines\"\n");
  CHECK(table.markdown() == "| only         |\n| :----------- |\n| -            |\n| two<br>lines |\n");
  CHECK(table.terminal() == "only\n─────────\n-\ntwo lines\n");
  CHECK_THROWS_AS(table.add_row({"a", "b"}), std::invalid_argument);
  CHECK_THROWS_AS(Table({}), std::invalid_argument);
}

TEST_CASE("text is measured in characters and made safe for XML", "[statistics]") {
  CHECK(display_width("") == 0);
  CHECK(display_width("a±π…😀") == 5);
  CHECK(display_width("\xC3") == 1);
  CHECK(display_width("\xE2\x80") == 2);
  CHECK(escape_xml("<a b=\"c\">&'") == "&lt;a b=&quot;c&quot;&gt;&amp;'");
  CHECK(escape_xml(std::string_view("x\0\x1b\xFF\xC0\xAFy", 7)) == "x\uFFFD\uFFFD\uFFFD\uFFFD\uFFFDy");
  CHECK(escape_xml("\xED\xA0\x80") == "\uFFFD\uFFFD\uFFFD");  // half of a surrogate pair
}
