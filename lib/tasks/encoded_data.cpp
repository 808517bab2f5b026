#include "tasks/encoded_data.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/error.h"
#include "io/json_object.h"
#include "io/safetensors.h"
#include "io/sha256.h"

// A safetensors file. Of a split's n examples: `ids` and `targets` lie one behind the other, `ids_end` and
// `targets_end` [n] say where each ends, `labels` [n] are NaN where there is none, `names` are the examples' ids.
namespace mergex::tasks {
namespace fs = std::filesystem;
namespace {

constexpr int kVersion = 1;
constexpr const char* kDescription = "description";
constexpr const char* kChecksum = "sha256";

std::string split_key(const std::string& split, const char* part) { return split + "." + part; }

std::string checksum(std::span<const io::TensorView> tensors, const std::string& description) {
  std::vector<std::string> parts;
  for (const auto& t : tensors) {
    parts.push_back(fmt::format("{} {} {} {}", t.name, io::dtype_name(t.dtype), io::shape_text(t.shape),
                                io::sha256_hex(t.bytes)));
  }
  std::ranges::sort(parts);
  const auto text = fmt::format("{}\n{}", description, fmt::join(parts, "\n"));
  return io::sha256_hex(std::as_bytes(std::span(text)));
}

std::string checksum_of(const io::SafetensorsFile& file) {
  const auto description = file.metadata().find(kDescription);
  return checksum(file.tensors(), description == file.metadata().end() ? "" : description->second);
}

template <class T>
constexpr io::DType dtype_of() {
  if constexpr (std::is_same_v<T, std::int32_t>) return io::DType::kI32;
  if constexpr (std::is_same_v<T, std::int64_t>) return io::DType::kI64;
  if constexpr (std::is_same_v<T, double>) return io::DType::kF64;
  if constexpr (std::is_same_v<T, char>) return io::DType::kU8;
}

template <class T>
io::TensorView view(std::string name, std::span<const T> values) {
  return {std::move(name), dtype_of<T>(), {static_cast<std::int64_t>(values.size())}, std::as_bytes(values)};
}

/// The examples of a split side by side.
struct Columns {
  std::vector<std::int32_t> ids, targets;
  std::vector<std::int64_t> ids_end, targets_end, names_end;
  std::vector<double> labels;
  std::string names;

  explicit Columns(const std::vector<Encoded>& examples) {
    for (const auto& example : examples) {
      ids.insert(ids.end(), example.ids.begin(), example.ids.end());
      ids_end.push_back(std::ssize(ids));
      targets.insert(targets.end(), example.target_ids.begin(), example.target_ids.end());
      targets_end.push_back(std::ssize(targets));
      names += example.id;
      names_end.push_back(std::ssize(names));
      labels.push_back(example.label.value_or(std::numeric_limits<double>::quiet_NaN()));
    }
  }

  void add_views(const std::string& split, std::vector<io::TensorView>& views) const {
    views.push_back(view<std::int32_t>(split_key(split, "ids"), ids));
    views.push_back(view<std::int64_t>(split_key(split, "ids_end"), ids_end));
    views.push_back(view<std::int32_t>(split_key(split, "targets"), targets));
    views.push_back(view<std::int64_t>(split_key(split, "targets_end"), targets_end));
    views.push_back(view<char>(split_key(split, "names"), names));
    views.push_back(view<std::int64_t>(split_key(split, "names_end"), names_end));
    views.push_back(view<double>(split_key(split, "labels"), labels));
  }
};

class SplitReader {
 public:
  SplitReader(const io::SafetensorsFile& file, std::string split, std::int64_t vocab_size)
      : file_(file), split_(std::move(split)), vocab_size_(vocab_size) {}

  std::vector<Encoded> read() const {
    const auto ids = column<std::int32_t>("ids"), targets = column<std::int32_t>("targets");
    const auto names = column<char>("names");
    const auto labels = column<double>("labels");
    const auto ids_end = ends("ids_end", ids.size(), labels.size());
    const auto targets_end = ends("targets_end", targets.size(), labels.size());
    const auto names_end = ends("names_end", names.size(), labels.size());
    for (const auto* list : {&ids, &targets}) {
      if (std::ranges::any_of(*list, [&](std::int32_t id) { return id < 0 || id >= vocab_size_; })) {
        refuse("ids", "holds an id that the tokenizer does not have");
      }
    }
    std::vector<Encoded> examples(labels.size());
    for (std::size_t i = 0; i < examples.size(); ++i) {
      auto& example = examples[i];
      example.ids = piece(ids, ids_end, i);
      example.target_ids = piece(targets, targets_end, i);
      const auto name = piece(names, names_end, i);
      example.id.assign(name.begin(), name.end());
      if (!std::isnan(labels[i])) example.label = labels[i];
    }
    return examples;
  }

 private:
  template <class T>
  std::vector<T> column(const char* part) const {
    const auto* found = file_.find(split_key(split_, part));
    if (found == nullptr || found->dtype != dtype_of<T>() || found->shape.size() != 1) {
      refuse(part, "is missing or of another kind");
    }
    std::vector<T> values(found->bytes.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), found->bytes.data(), found->bytes.size());
    return values;
  }

  std::vector<std::int64_t> ends(const char* part, std::size_t num_values, std::size_t num_examples) const {
    auto values = column<std::int64_t>(part);
    if (values.size() != num_examples || !std::ranges::is_sorted(values) ||
        (values.empty() ? 0 : values.back()) != static_cast<std::int64_t>(num_values) ||
        (!values.empty() && values.front() < 0)) {
      refuse(part, "does not fit the other columns");
    }
    return values;
  }

  template <class T>
  static std::vector<T> piece(const std::vector<T>& values, const std::vector<std::int64_t>& ends, std::size_t i) {
    return {values.begin() + (i == 0 ? 0 : ends[i - 1]), values.begin() + ends[i]};
  }

  [[noreturn]] void refuse(const char* part, const char* why) const {
    fail("{}: no encoded data: \"{}\" {}", file_.path().string(), split_key(split_, part), why);
  }

  const io::SafetensorsFile& file_;
  std::string split_;
  std::int64_t vocab_size_;
};

std::string validation_name(std::size_t i) { return fmt::format("validation.{}", i); }

}  // namespace

std::string encoded_data_key(const io::Json& options, std::span<const InputFile> files, const fs::path& tokenizer_file) {
  io::Json all{{"version", kVersion}, {"options", options}, {"tokenizer", io::sha256_file(tokenizer_file)}};
  for (const auto& [split, path] : files) {
    all["files"].push_back({{"split", split}, {"path", path.string()}, {"sha256", io::sha256_file(path)}});
  }
  const auto text = all.dump(-1, ' ', false, io::Json::error_handler_t::replace);
  return io::sha256_hex(std::as_bytes(std::span(text)));
}

void write_encoded_data(const fs::path& path, const EncodedData& encoded) {
  std::vector<Columns> columns;
  columns.reserve(1 + encoded.validation.size());  // views point into them
  std::vector<io::TensorView> views;
  columns.emplace_back(encoded.train).add_views("train", views);
  for (std::size_t i = 0; i < encoded.validation.size(); ++i) {
    columns.emplace_back(encoded.validation[i]).add_views(validation_name(i), views);
  }
  const auto& data = encoded.data;
  const auto description = io::Json{{"version", kVersion},
                                    {"labels", data.labels},
                                    {"metrics", data.metrics},
                                    {"skipped_lines", data.skipped_lines},
                                    {"warnings", data.warnings},
                                    {"notes", data.notes}}
                               .dump(-1, ' ', false, io::Json::error_handler_t::replace);
  const auto own = fs::path(fmt::format("{}.{}", path.string(), ::getpid()));
  io::write_safetensors(own, views, {{kDescription, description}, {kChecksum, checksum(views, description)}});
  fs::rename(own, path);
}

EncodedData read_encoded_data(const fs::path& path, std::span<const InputFile> files, std::int64_t vocab_size) {
  const auto file = io::SafetensorsFile::open(path);
  const auto stated = file.metadata().find(kChecksum), described = file.metadata().find(kDescription);
  if (stated == file.metadata().end() || described == file.metadata().end() || stated->second != checksum_of(file)) {
    fail("{}: no encoded data, or changed since it was written: its checksum is another one", path.string());
  }
  EncodedData result;
  auto& data = result.data;
  auto document = std::make_shared<io::JsonDocument>();
  document->file = path.string();
  document->value = io::parse_json(described->second, path.string());
  io::JsonObject description(document);
  description.required<std::int64_t>("version", {.at_least = kVersion, .at_most = kVersion});
  data.labels = description.required<std::vector<std::string>>("labels");
  data.metrics = description.required<std::vector<std::string>>("metrics");
  data.skipped_lines = static_cast<std::size_t>(description.required<std::int64_t>("skipped_lines", {.at_least = 0}));
  data.warnings = description.required<std::vector<std::string>>("warnings");
  data.notes = description.required<std::vector<std::string>>("notes");
  description.finish();
  for (const auto& [split, input] : files) {
    data.files.push_back(input);
    if (split == "train") {
      data.train = {split, {}, input};
      result.train = SplitReader(file, "train", vocab_size).read();
    } else {
      result.validation.push_back(SplitReader(file, validation_name(data.validation.size()), vocab_size).read());
      data.validation.push_back({split, {}, input});
    }
  }
  return result;
}

std::string encoded_data_checksum(const fs::path& path) { return checksum_of(io::SafetensorsFile::open(path)); }

}  // namespace mergex::tasks
