#include "io/table.h"

#include <algorithm>

#include "core/error.h"
#include "core/one_line.h"
#include "core/utf8.h"
#include "core/suggest.h"
#include "io/json.h"

namespace mergex::io {
namespace fs = std::filesystem;
namespace {

std::string column_count(std::size_t count) { return fmt::format("{} column{}", count, count == 1 ? "" : "s"); }

std::string listed(const std::vector<std::string>& names) {
  if (names.empty()) return "none";
  return fmt::format("\"{}\"", one_line(fmt::format("{}", fmt::join(names, "\", \""))));
}

}  // namespace

std::optional<TableFormat> table_format(const fs::path& path) {
  const auto ending = path.extension() == ".gz" ? path.stem().extension() : path.extension();
  if (ending == ".tsv") return TableFormat::kTsv;
  if (ending == ".csv") return TableFormat::kCsv;
  if (ending == ".jsonl") return TableFormat::kJsonl;
  return std::nullopt;
}

Table::Table(const fs::path& path, std::vector<TableColumn> columns, TableOptions options)
    : lines_(path), columns_(std::move(columns)), options_(std::move(options)) {
  row_.cells.resize(columns_.size());
  if (options_.format == TableFormat::kJsonl) return;
  if (options_.header.empty()) {
    read_header();
  } else {
    header_ = options_.header;
  }
  resolve_columns();
}

void Table::read_header() {
  const auto line = lines_.next();
  if (!line) fail("{}: is empty, expected a header line with the names of the columns", lines_.name());
  row_.line = 1;
  if (!is_valid_utf8(*line)) fail("{}:1: invalid UTF-8 in the header; convert the file to UTF-8", lines_.name());
  const auto problem = options_.format == TableFormat::kCsv ? split_csv(*line) : split_tsv(*line);
  if (!problem.empty()) fail("{}:1: {}; fix the header", lines_.name(), problem);
  header_.assign(cells_.begin(), cells_.end());
}

void Table::resolve_columns() {
  for (const auto& column : columns_) {
    std::optional<std::size_t> position;
    for (const auto& name : column.names) {
      const auto found = std::ranges::find(header_, name);
      if (found == header_.end()) continue;
      if (std::find(found + 1, header_.end(), name) != header_.end()) {
        fail("{}:1: two columns are called \"{}\"; rename one", lines_.name(), one_line(name));
      }
      position = static_cast<std::size_t>(found - header_.begin());
      break;
    }
    if (!position && column.required) {
      fail("{}:1: no column {}; the header has {}", lines_.name(), quoted_list(column.names), listed(header_));
    }
    positions_.push_back(position);
  }
}

bool Table::has_column(std::size_t wanted) const {
  return options_.format == TableFormat::kJsonl || positions_[wanted].has_value();
}

const TableRow* Table::next() {
  while (auto line = lines_.next()) {
    const auto first_empty = lines_.number();
    while (line && line->empty()) line = lines_.next();
    if (!line) return nullptr;
    row_.line = lines_.number();
    if (row_.line > first_empty) bad_lines(first_empty, row_.line - first_empty, "the line is empty");
    row_.number = num_rows_++;
    const auto problem = read_cells(*line);
    if (problem.empty()) return &row_;
    reject(problem);
  }
  return nullptr;
}

void Table::reject(std::string_view problem) { bad_lines(row_.line, lines_.number() - row_.line + 1, problem); }

void Table::bad_lines(std::size_t line, std::size_t count, std::string_view problem) {
  if (!options_.skip_bad_lines) fail("{}:{}: {}; {}", lines_.name(), line, problem, options_.remedy);
  if (skipped_lines_ == 0) first_problem_ = fmt::format("{}:{}: {}", lines_.name(), line, problem);
  skipped_lines_ += count;
}

std::string Table::read_cells(std::string_view line) {
  if (options_.format == TableFormat::kJsonl) return read_object(line);
  if (options_.format == TableFormat::kCsv) {
    if (auto problem = split_csv(line); !problem.empty()) return problem;
    if (!std::ranges::all_of(cells_, is_valid_utf8)) return "invalid UTF-8";
  } else {
    if (!is_valid_utf8(line)) return "invalid UTF-8";
    split_tsv(line);
  }
  if (cells_.size() != header_.size()) {
    return fmt::format("found {}, expected {}{}", column_count(cells_.size()), header_.size(),
                       options_.header.empty() ? " as in the header" : "");
  }
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    row_.cells[i] = positions_[i] ? std::optional(cells_[*positions_[i]]) : std::nullopt;
  }
  return {};
}

std::string Table::split_tsv(std::string_view line) {
  cells_.clear();
  std::size_t start = 0;
  for (auto tab = line.find('\t'); tab != std::string_view::npos; tab = line.find('\t', start)) {
    cells_.push_back(line.substr(start, tab - start));
    start = tab + 1;
  }
  cells_.push_back(line.substr(start));
  return {};
}

std::string Table::split_csv(std::string_view line) {
  storage_.clear();
  cells_.clear();
  std::size_t total = 0;
  for (std::size_t at = 0;; ++at) {  // one cell each time; `at` ends on the comma behind it
    std::string cell;
    if (at < line.size() && line[at] == '"') {
      ++at;
      while (true) {
        const auto quote = line.find('"', at);
        if (quote == std::string_view::npos) {
          cell.append(line.substr(at)).push_back('\n');
          const auto more = lines_.next();
          if (!more) return "a quote is opened and never closed";
          if (total + cell.size() > TextLines::kMaxLineBytes) {
            fail("{}:{}: a quoted cell is longer than 16 MiB; is its quote closed?", lines_.name(), row_.line);
          }
          line = *more;
          at = 0;
          continue;
        }
        cell.append(line.substr(at, quote - at));
        at = quote + 1;
        if (at >= line.size() || line[at] != '"') break;
        cell.push_back('"');
        ++at;
      }
      if (at < line.size() && line[at] != ',') return "text behind a closing quote (inside a quoted cell write \"\")";
    } else {
      const auto end = std::min(line.find(',', at), line.size());
      cell = line.substr(at, end - at);
      if (cell.find('"') != std::string::npos) return "a quote inside an unquoted cell (quote the whole cell)";
      at = end;
    }
    total += cell.size();
    storage_.push_back(std::move(cell));
    if (at >= line.size()) break;
  }
  cells_.assign(storage_.begin(), storage_.end());
  return {};
}

std::string Table::read_object(std::string_view line) {
  if (!is_valid_utf8(line)) return "invalid UTF-8";
  Json object;
  try {
    object = parse_json(line, "");
  } catch (const UserError& error) {
    // ":1:7: not valid JSON ..." or "#/a: key given twice ...": the line's number is said by the caller
    std::string what = error.what();
    if (what.starts_with(":1:")) return "column " + what.substr(3);
    return what.starts_with(": ") ? what.substr(2) : what;
  }
  if (!object.is_object()) return fmt::format("found {}, expected an object {{...}}", shown(object));
  storage_.clear();
  storage_.reserve(columns_.size());  // cells point into it
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    row_.cells[i] = std::nullopt;
    for (const auto& name : columns_[i].names) {
      const auto found = object.find(name);
      if (found == object.end() || found->is_null()) continue;
      if (found->is_structured()) {
        return fmt::format("\"{}\" is {}, expected a string, a number, true or false", name, shown(*found));
      }
      storage_.push_back(found->is_string() ? found->get<std::string>() : found->dump());
      row_.cells[i] = storage_.back();
      break;
    }
    if (!row_.cells[i] && columns_[i].required) {
      std::vector<std::string> keys;
      for (const auto& [key, value] : object.items()) keys.push_back(key);
      return fmt::format("no key {}; the object has {}", quoted_list(columns_[i].names), listed(keys));
    }
  }
  return {};
}

}  // namespace mergex::io
