#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/text_lines.h"

namespace mergex::io {

/// tsv: cells between tabs, a quote is text like any other. csv: RFC 4180, a quoted cell may hold commas, doubled
/// quotes and line ends. jsonl: one strict JSON object per line, whose keys are the columns.
enum class TableFormat { kTsv, kCsv, kJsonl };

/// By the file's ending, with or without ".gz" behind it; nothing for another ending.
std::optional<TableFormat> table_format(const std::filesystem::path& path);

/// A column that a reader wants, under any of several names; the first that the file has is taken.
struct TableColumn {
  std::vector<std::string> names;
  bool required = true;
};

struct TableOptions {
  TableFormat format = TableFormat::kTsv;
  std::vector<std::string> header = {};  ///< names of the columns of a file without a header line
  bool skip_bad_lines = false;           ///< malformed lines are counted instead of being an error
  std::string remedy = "fix the line";   ///< ends the message about a malformed line
};

struct TableRow {
  std::size_t line = 0;                                ///< its first line in the file, counted from 1
  std::size_t number = 0;                              ///< counted from 0, malformed rows included
  std::vector<std::optional<std::string_view>> cells;  ///< by wanted column; empty where the file or the row has none
};

/// The rows of a TSV, CSV or JSONL file, plain or gzip, read one after another. Empty lines at the end are ignored.
/// A line with the wrong number of columns, invalid UTF-8, a broken quote or broken JSON is malformed: an error
/// "<file>:<line>: found 3 columns, expected 4 ...", or skipped and counted.
class Table {
 public:
  /// @throws UserError when the file cannot be read, has no header, or lacks a required column
  Table(const std::filesystem::path& path, std::vector<TableColumn> columns, TableOptions options);

  /// The next well-formed row, valid until the next call; null at the end.
  const TableRow* next();

  /// Declares the row that was returned last malformed (an unknown label): an error or counted, like the others.
  void reject(std::string_view problem);

  /// Whether the header has the wanted column; always true for JSONL, where each row answers for itself.
  bool has_column(std::size_t wanted) const;

  std::size_t skipped_lines() const { return skipped_lines_; }
  /// Message of the first line that was skipped.
  const std::string& first_problem() const { return first_problem_; }

 private:
  void read_header();
  void resolve_columns();
  std::string read_cells(std::string_view line);
  std::string split_tsv(std::string_view line);
  std::string split_csv(std::string_view line);
  std::string read_object(std::string_view line);
  void bad_lines(std::size_t line, std::size_t count, std::string_view problem);

  TextLines lines_;
  std::vector<TableColumn> columns_;
  TableOptions options_;
  std::vector<std::string> header_;
  std::vector<std::optional<std::size_t>> positions_;  // of the wanted columns in the header
  std::vector<std::string_view> cells_;                // of the current line, by header
  std::vector<std::string> storage_;                   // what cells point into where the text had to be rewritten
  TableRow row_;
  std::size_t num_rows_ = 0;
  std::size_t skipped_lines_ = 0;
  std::string first_problem_;
};

}  // namespace mergex::io
