#include "statistics/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <stdexcept>

#include "statistics/utf8.h"

namespace mergex::statistics {
namespace {

std::string padded(const std::string& text, std::size_t width, Align align) {
  const std::size_t used = display_width(text);
  const std::size_t space = width > used ? width - used : 0;
  const std::size_t before = align == Align::right ? space : align == Align::center ? space / 2 : 0;
  return std::string(before, ' ') + text + std::string(space - before, ' ');
}

// A pipe or a line break would end the cell.
std::string escape_markdown(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '|') {
      escaped += "\\|";
    } else if (c == '\n') {
      escaped += "<br>";
    } else if (c != '\r') {
      escaped += c;
    }
  }
  return escaped;
}

std::string on_one_line(const std::string& text) {
  std::string line = text;
  std::ranges::replace_if(line, [](char c) { return c == '\n' || c == '\r' || c == '\t'; }, ' ');
  return line;
}

std::string quote_csv(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + '"';
}

using Lines = std::vector<std::vector<std::string>>;

// The header and all rows as text, through `transform`.
template <class Transform>
Lines texts(const std::vector<Column>& columns, const std::vector<std::vector<Cell>>& rows, std::string_view missing,
            Transform transform) {
  Lines lines(1);
  for (const auto& column : columns) lines.front().push_back(transform(column.header));
  for (const auto& row : rows) {
    auto& line = lines.emplace_back();
    for (const auto& cell : row) line.push_back(transform(cell.value_or(std::string(missing))));
  }
  return lines;
}

std::vector<std::size_t> widths(const Lines& lines, std::size_t at_least) {
  std::vector<std::size_t> result(lines.front().size(), at_least);
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) result[i] = std::max(result[i], display_width(line[i]));
  }
  return result;
}

}  // namespace

Cell number(double value, int digits) {
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0.0 ? "inf" : "-inf";
  auto text = fmt::format("{:.{}f}", value, digits);
  if (text.starts_with('-') && text.find_first_of("123456789") == std::string::npos) text.erase(0, 1);
  return text;
}

Cell number(std::optional<double> value, int digits) {
  return value ? number(*value, digits) : std::nullopt;
}

Cell number(const Score& score, int digits) {
  return score.defined ? number(score.value, digits) : Cell("undefined");
}

Cell mean_deviation(const Summary& summary, int digits) {
  const auto mean = number(summary.mean, digits);
  return summary.deviation ? *mean + " ± " + *number(*summary.deviation, digits) : mean;
}

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {
  if (columns_.empty()) throw std::invalid_argument("a table needs a column");
}

void Table::add_row(std::vector<Cell> cells) {
  if (cells.size() != columns_.size()) {
    throw std::invalid_argument(fmt::format("table row of {} cells, {} columns", cells.size(), columns_.size()));
  }
  rows_.push_back(std::move(cells));
}

std::string Table::markdown() const {
  const auto lines = texts(columns_, rows_, "-", escape_markdown);
  const auto column_widths = widths(lines, 3);
  std::string text;
  const auto write = [&](const std::vector<std::string>& line) {
    for (std::size_t i = 0; i < line.size(); ++i) {
      text += "| " + padded(line[i], column_widths[i], columns_[i].align) + ' ';
    }
    text += "|\n";
  };
  write(lines.front());
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    auto rule = std::string(column_widths[i], '-');
    if (columns_[i].align != Align::left) rule.back() = ':';
    if (columns_[i].align != Align::right) rule.front() = ':';
    text += "| " + rule + ' ';
  }
  text += "|\n";
  for (const auto& line : std::span(lines).subspan(1)) write(line);
  return text;
}

std::string Table::csv() const {
  std::string text;
  for (const auto& line : texts(columns_, rows_, "", quote_csv)) {
    std::string row;
    for (std::size_t i = 0; i < line.size(); ++i) row += (i > 0 ? "," : "") + line[i];
    // A single empty field would be an empty line, which readers skip.
    text += (row.empty() ? "\"\"" : row) + '\n';
  }
  return text;
}

std::string Table::terminal() const {
  const auto lines = texts(columns_, rows_, "-", on_one_line);
  const auto column_widths = widths(lines, 1);
  std::string text;
  for (std::size_t row = 0; row < lines.size(); ++row) {
    std::string line;
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      line += (i > 0 ? "  " : "") + padded(lines[row][i], column_widths[i], columns_[i].align);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
    if (row > 0) continue;
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      if (i > 0) text += "  ";
      for (std::size_t j = 0; j < column_widths[i]; ++j) text += "─";
    }
    text += '\n';
  }
  return text;
}

}  // namespace mergex::statistics
