#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "io/json.h"
#include "statistics/table.h"

namespace mergex::engine {

/// A finished run (the content of its results.json) under the name of the table's row that it belongs to.
struct ReportRow {
  std::string label;
  io::Json result;
  std::filesystem::path folder;  ///< of the run
};

/// Metrics are fractions; tables and plots show hundredths of them, as papers do. A loss is shown as it is.
double display_scale(const std::string& metric);
/// `accuracy ×100`
std::string display_name(const std::string& metric);

/// The table and the plots of a run or a sweep: runs with the same label are repeated seeds, summarised as mean and
/// sample standard deviation.
class Report {
 public:
  /// @param failures  "row: why", for rows that gave no result
  Report(std::string title, std::vector<ReportRow> rows, std::vector<std::string> failures = {});

  /// Table and notes for a person at a terminal.
  std::string terminal() const;
  /// table.md, table.csv, scores.svg and curves.svg
  void write(const std::filesystem::path& folder) const;
  /// One line that says where they are.
  std::string where(const std::filesystem::path& folder) const;

 private:
  struct Group {
    std::string label;
    std::vector<io::Json> results;
  };
  void build_table();
  void build_notes();
  std::string plot() const;

  std::string title_;
  std::vector<ReportRow> rows_;
  std::vector<Group> groups_;
  std::vector<std::string> failures_;
  statistics::Table table_;
  std::vector<std::string> notes_;
};

}  // namespace mergex::engine
