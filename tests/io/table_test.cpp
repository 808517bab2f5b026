#include "io/table.h"

#include <zlib.h>

#include <atomic>

#include "core/interrupt.h"
#include "io/atomic_file.h"
#include "core/utf8.h"
#include "support/catch.h"
#include "support/paths.h"

using namespace mergex;
namespace fs = std::filesystem;

namespace {

fs::path write_gzip(const fs::path& path, const std::string& content) {
  gzFile file = gzopen(path.c_str(), "wb");
  REQUIRE(file != nullptr);
  REQUIRE(gzwrite(file, content.data(), static_cast<unsigned>(content.size())) == static_cast<int>(content.size()));
  REQUIRE(gzclose(file) == Z_OK);
  return path;
}

std::vector<std::string> lines_of(const fs::path& path) {
  std::vector<std::string> result;
  io::TextLines lines(path);
  while (const auto line = lines.next()) {
    result.emplace_back(*line);
    CHECK(lines.number() == result.size());
  }
  CHECK_FALSE(lines.next());
  return result;
}

using Rows = std::vector<std::vector<std::string>>;

/// "-" stands for a cell that is not there.
Rows rows_of(const fs::path& path, std::vector<io::TableColumn> columns, io::TableOptions options) {
  Rows result;
  io::Table table(path, std::move(columns), std::move(options));
  while (const auto* row = table.next()) {
    std::vector<std::string> cells;
    for (const auto& cell : row->cells) cells.emplace_back(cell.value_or("-"));
    result.push_back(std::move(cells));
  }
  return result;
}

const std::vector<io::TableColumn> kAB{{{"a"}}, {{"b"}}};

}  // namespace

TEST_CASE("lines: byte order mark, both line ends, a last line without one", "[io]") {
  const test::TemporaryFolder folder;
  using Lines = std::vector<std::string>;
  const auto path = folder / "x.txt";
  CHECK(lines_of(test::write_text(path, "")).empty());
  CHECK(lines_of(test::write_text(path, "\n")) == Lines{""});
  CHECK(lines_of(test::write_text(path,
                                  "\xEF\xBB\xBF"
                                  "a\r\n\r\nb\rc\nd")) == Lines{"a", "", "b\rc", "d"});
  CHECK(lines_of(test::write_text(path, "a\n\xEF\xBB\xBFz\n")) == Lines{"a", "\xEF\xBB\xBFz"});
}

TEST_CASE("lines of a gzip file are those of the plain file, across buffers", "[io]") {
  const test::TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 5000; ++i)
    text += std::string(static_cast<std::size_t>(i * 37 % 1000), 'x') + std::to_string(i) + "\r\n";
  text += std::string(600'000, 'y') + "\nend";
  const auto plain = lines_of(test::write_text(folder / "a.txt", text));
  CHECK(plain.size() == 5002);
  CHECK(plain[5000].size() == 600'000);
  CHECK(lines_of(write_gzip(folder / "a.gz", text)) == plain);
}

TEST_CASE("a file that cannot be read as lines is named", "[io]") {
  const test::TemporaryFolder folder;
  const auto missing = folder / "missing.txt";
  CHECK(test::user_error([&] { io::TextLines{missing}; }) == missing.string() + ": no such file");
  CHECK(test::user_error([&] { io::TextLines{folder.path()}; }) ==
        folder.path().string() + ": is a folder, expected a file");

  std::string text;
  for (int i = 0; i < 20000; ++i) text += std::to_string(i * 7919 % 10007) + "\n";
  const auto whole = io::read_file(write_gzip(folder / "whole.gz", text));
  const auto cut = test::write_text(folder / "cut.gz", whole.substr(0, whole.size() / 2));
  CHECK(test::user_error([&] { lines_of(cut); }) ==
        cut.string() + ": damaged or cut-off gzip file (unexpected end of file); fetch it again");
  auto flipped = whole;
  flipped[flipped.size() - 6] ^= 1;  // in the checksum
  const auto damaged = test::write_text(folder / "damaged.gz", flipped);
  CHECK(test::user_error([&] { lines_of(damaged); }) ==
        damaged.string() + ": damaged or cut-off gzip file (incorrect data check); fetch it again");

  const auto longest = std::string(io::TextLines::kMaxLineBytes, 'x');
  CHECK(lines_of(test::write_text(folder / "long.txt", "a\n" + longest + "\nb")).size() == 3);
  const auto too_long = test::write_text(folder / "long.txt", "a\n" + longest + "x");
  CHECK(test::user_error([&] { lines_of(too_long); }) ==
        too_long.string() + ":2: the line is longer than 16 MiB; split it (is this a text file?)");
}

TEST_CASE("reading lines stops when the user asks for it", "[io]") {
  const test::TemporaryFolder folder;
  const auto path = test::write_text(folder / "x.txt", "a\n");
  stop_signal() = 2;
  CHECK_THROWS_AS(io::TextLines(path).next(), Interrupted);
  stop_signal() = 0;
}

TEST_CASE("a file is found plain or compressed", "[io]") {
  const test::TemporaryFolder folder;
  const auto a = test::write_text(folder / "a.tsv", ""), b = test::write_text(folder / "b.tsv.gz", "");
  CHECK(io::find_text_file(a) == a);
  CHECK(io::find_text_file(folder / "a.tsv.gz") == a);
  CHECK(io::find_text_file(folder / "b.tsv") == b);
  CHECK(io::find_text_file(b) == b);
  CHECK_FALSE(io::find_text_file(folder / "c.tsv"));
  CHECK_FALSE(io::find_text_file(folder.path()));
}

TEST_CASE("UTF-8 is told from what is not", "[io]") {
  for (const std::string_view good : {"", "plain ascii, longer than eight", "na\xC3\xAFve", "\xE2\x82\xAC",
                                      "\xF0\x9F\x98\x80", "\xED\x9F\xBF", "\xF4\x8F\xBF\xBF", "12345678\xC2\x80"}) {
    CHECK(is_valid_utf8(good));
  }
  for (const std::string_view bad :
       {"\x80", "\xC3", "\xC0\xAF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80",
        "\xF5\x80\x80\x80", "\xFF", "12345678\xE2\x82", "caf\xE9 au lait"}) {
    CHECK_FALSE(is_valid_utf8(bad));
  }
}

TEST_CASE("the format of a table is its ending", "[io]") {
  CHECK(io::table_format("d/x.tsv") == io::TableFormat::kTsv);
  CHECK(io::table_format("x.csv.gz") == io::TableFormat::kCsv);
  CHECK(io::table_format("x.jsonl.gz") == io::TableFormat::kJsonl);
  CHECK_FALSE(io::table_format("x.txt"));
  CHECK_FALSE(io::table_format("x.gz"));
}

TEST_CASE("TSV: a quote is text, columns go by name", "[io]") {
  const test::TemporaryFolder folder;
  const auto path = test::write_text(folder / "x.tsv", "b\tc\ta\n\"unpaired\t2\t3\nx\t\t\"y\"\"\"\n\n\n");
  CHECK(rows_of(path, kAB, {}) == Rows{{"3", "\"unpaired"}, {"\"y\"\"\"", "x"}});
  CHECK(rows_of(path, {{{"zz", "c"}}, {{"d"}, false}}, {}) == Rows{{"2", "-"}, {"", "-"}});
  const io::Table table(path, {{{"a"}}, {{"d"}, false}}, {});
  CHECK(table.has_column(0));
  CHECK_FALSE(table.has_column(1));
  CHECK(rows_of(test::write_text(folder / "y.tsv", "1\t2\n3\t4"), kAB, {.header = {"a", "b"}}) ==
        Rows{{"1", "2"}, {"3", "4"}});
}

TEST_CASE("malformed lines are errors, or counted", "[io]") {
  const test::TemporaryFolder folder;
  const auto path = test::write_text(folder / "x.tsv", "a\tb\n1\t2\n3\n\n4\t5\t6\n\xFF\t7\n8\t9\n");
  const auto message = [&] { return test::user_error([&] { rows_of(path, kAB, {.remedy = "mend it"}); }); };
  CHECK(message() == path.string() + ":3: found 1 column, expected 2 as in the header; mend it");

  io::Table table(path, kAB, {.skip_bad_lines = true});
  const auto* row = table.next();
  REQUIRE(row != nullptr);
  CHECK(row->line == 2);
  CHECK(row->number == 0);
  row = table.next();
  REQUIRE(row != nullptr);
  CHECK(row->line == 7);
  CHECK(row->number == 4);  // three malformed rows lie between; an empty line is no row
  CHECK(*row->cells[0] == "8");
  CHECK(table.skipped_lines() == 4);
  table.reject("not a good number");
  CHECK(table.skipped_lines() == 5);
  CHECK(table.first_problem() == path.string() + ":3: found 1 column, expected 2 as in the header");
  CHECK(table.next() == nullptr);

  test::write_text(path, "a\tb\n\n1\t2\n");
  CHECK(message() == path.string() + ":2: the line is empty; mend it");
  test::write_text(path, "a\tb\n1\t\xC3\n");
  CHECK(message() == path.string() + ":2: invalid UTF-8; mend it");
}

TEST_CASE("a header is needed and must name the columns", "[io]") {
  const test::TemporaryFolder folder;
  const auto path = test::write_text(folder / "x.tsv", "");
  const auto message = [&] { return test::user_error([&] { rows_of(path, kAB, {.skip_bad_lines = true}); }); };
  CHECK(message() == path.string() + ": is empty, expected a header line with the names of the columns");
  test::write_text(path, "a\tc\n");
  CHECK(message() == path.string() + ":1: no column \"b\"; the header has \"a\", \"c\"");
  test::write_text(path, "a\tb\tb\n");
  CHECK(message() == path.string() + ":1: two columns are called \"b\"; rename one");
  test::write_text(path, "a\t\xFF\n");
  CHECK(message() == path.string() + ":1: invalid UTF-8 in the header; convert the file to UTF-8");
  test::write_text(path, "sentense\tlabel\n");
  CHECK(test::user_error([&] {
          rows_of(path, {{{"sentence", "text"}}}, {});
        }) == path.string() + ":1: no column \"sentence\" or \"text\"; the header has \"sentense\", \"label\"");
}

TEST_CASE("CSV: quoted cells hold commas, quotes and line ends", "[io]") {
  const test::TemporaryFolder folder;
  const io::TableOptions csv{.format = io::TableFormat::kCsv};
  const auto path = test::write_text(folder / "x.csv",
                                     "a,\"b\"\r\n"
                                     "1,\"two, \"\"2\"\"\"\r\n"
                                     "\"line one\r\n\r\nline three\",\r\n"
                                     ",\"\"\r\n");
  CHECK(rows_of(path, kAB, csv) == Rows{{"1", "two, \"2\""}, {"line one\n\nline three", ""}, {"", ""}});
  io::Table table(path, kAB, csv);
  table.next();
  CHECK(table.next()->line == 3);
  CHECK(table.next()->line == 6);

  const auto message = [&] { return test::user_error([&] { rows_of(path, kAB, csv); }); };
  test::write_text(path, "a,b\n1,2,3\n");
  CHECK(message() == path.string() + ":2: found 3 columns, expected 2 as in the header; fix the line");
  test::write_text(path, "a,b\n1,\"2\"3\n");
  CHECK(message() == path.string() + ":2: text behind a closing quote (inside a quoted cell write \"\"); fix the line");
  test::write_text(path, "a,b\n1,2\"3\n");
  CHECK(message() == path.string() + ":2: a quote inside an unquoted cell (quote the whole cell); fix the line");
  test::write_text(path, "a,b\n1,\"2\n3,4\n");
  CHECK(message() == path.string() + ":2: a quote is opened and never closed; fix the line");
  test::write_text(path, "a,b\n1,\"\xFF\"\n");
  CHECK(message() == path.string() + ":2: invalid UTF-8; fix the line");
}

TEST_CASE("JSON Lines: one strict object per line", "[io]") {
  const test::TemporaryFolder folder;
  const io::TableOptions jsonl{.format = io::TableFormat::kJsonl};
  const auto path = folder / "x.jsonl";
  test::write_text(path, R"({"a": "x\ty\n", "b": 1, "more": [1]}
{"b": 2.5, "a": true}
{"a": "\u00e9", "b": ""}
)");
  CHECK(rows_of(path, kAB, jsonl) == Rows{{"x\ty\n", "1"}, {"true", "2.5"}, {"\xC3\xA9", ""}});
  test::write_text(path, "{\"a\": 1}\n{\"a\": 2, \"b\": null}\n{\"a\": 3, \"b\": 4}");
  CHECK(rows_of(path, {{{"a"}}, {{"b"}, false}}, jsonl) == Rows{{"1", "-"}, {"2", "-"}, {"3", "4"}});

  const auto message = [&](const std::string& line) {
    test::write_text(path, "{\"a\": 1, \"b\": 1}\n" + line + "\n");
    return test::user_error([&] { rows_of(path, kAB, jsonl); }).substr(path.string().size());
  };
  CHECK(message(R"({"a": 1})") == ":2: no key \"b\"; the object has \"a\"; fix the line");
  CHECK(message("{}") == ":2: no key \"a\"; the object has none; fix the line");
  CHECK(message("[1, 2]") == ":2: found [1,2], expected an object {...}; fix the line");
  CHECK(message(R"({"a": [1], "b": 1})") ==
        ":2: \"a\" is [1], expected a string, a number, true or false; fix the line");
  CHECK(message(R"({"a": 1, "a": 1, "b": 1})") == ":2: #/a: key given twice; keep one; fix the line");
  CHECK(message(R"({"a": 1,)").starts_with(":2: column 9: not valid JSON: "));
  CHECK(message(R"({"a": 1, "b": 1} {})").starts_with(":2: column 18: not valid JSON: "));
  CHECK(message("\xFF") == ":2: invalid UTF-8; fix the line");
}

TEST_CASE("a line end inside a column's name stays out of the message", "[io]") {
  const test::TemporaryFolder folder;
  const auto file = test::write_text(folder / "t.csv", "\"a\nb\",c\n1,2\n");
  CHECK(test::user_error([&] { io::Table{file, {{.names = {"text"}}}, {.format = io::TableFormat::kCsv}}; }) ==
        file.string() + R"(:1: no column "text"; the header has "a\nb", "c")");
}
