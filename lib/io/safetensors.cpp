#include "io/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <unordered_set>

#include "core/error.h"
#include "io/atomic_file.h"
#include "io/json.h"
#include "io/plain_json.h"

namespace mergex::io {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little endian and used as it is");

constexpr std::size_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's limit
constexpr std::string_view kMetadataKey = "__metadata__";

struct DTypeEntry {
  DType dtype;
  std::string_view name;
  std::size_t size;
};

// In the order in which the reference implementation sorts types (it writes the last one first).
constexpr std::array kDTypes{
    DTypeEntry{DType::kBool, "BOOL", 1}, DTypeEntry{DType::kU8, "U8", 1},   DTypeEntry{DType::kI8, "I8", 1},
    DTypeEntry{DType::kI16, "I16", 2},   DTypeEntry{DType::kU16, "U16", 2}, DTypeEntry{DType::kF16, "F16", 2},
    DTypeEntry{DType::kBF16, "BF16", 2}, DTypeEntry{DType::kI32, "I32", 4}, DTypeEntry{DType::kU32, "U32", 4},
    DTypeEntry{DType::kF32, "F32", 4},   DTypeEntry{DType::kF64, "F64", 8}, DTypeEntry{DType::kI64, "I64", 8},
    DTypeEntry{DType::kU64, "U64", 8}};

// Types of the format that no part of mergex computes with.
constexpr std::array<std::string_view, 8> kUnsupported{"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4",
                                                       "F6_E2M3", "F6_E3M2", "C64",     "F8_E4M3FNUZ"};

const DTypeEntry& entry(DType dtype) { return *std::ranges::find(kDTypes, dtype, &DTypeEntry::dtype); }

// A name out of an untrusted file: quoted, escaped, cut.
std::string shown_name(const std::string& name) { return shown(Json(name)); }

// A parser's message may carry a piece of the file: kept on one line and short.
std::string tamed(std::string_view message) {
  std::string text(message.substr(0, 300));
  std::ranges::replace_if(text, [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

// nullopt where the number of bytes does not fit. Zero-sized dimensions count as one here: whoever multiplies the
// others (strides) must be safe as well.
std::optional<std::uint64_t> bytes_of_shape(std::span<const std::int64_t> shape, std::size_t element_size) {
  std::int64_t bounded = static_cast<std::int64_t>(element_size);
  bool empty = false;
  for (const auto dimension : shape) {
    if (dimension < 0) return std::nullopt;
    empty = empty || dimension == 0;
    if (__builtin_mul_overflow(bounded, std::max<std::int64_t>(dimension, 1), &bounded)) return std::nullopt;
  }
  return empty ? 0 : static_cast<std::uint64_t>(bounded);
}

// What the header says of one tensor.
struct Placement {
  TensorView view;
  std::uint64_t begin = 0, end = 0;
};

Placement read_entry(const std::string& file, const std::string& name, const Json& value) {
  Placement placed;
  placed.view.name = name;
  if (!value.is_object()) fail("{}: tensor {}: got {}, expected an object", file, shown_name(name), shown(value));
  const Json *dtype = nullptr, *shape = nullptr, *offsets = nullptr;
  for (const auto& [key, member] : value.items()) {
    if (key == "dtype") {
      dtype = &member;
    } else if (key == "shape") {
      shape = &member;
    } else if (key == "data_offsets") {
      offsets = &member;
    } else {
      fail("{}: tensor {}: unknown key {}, expected dtype, shape and data_offsets", file, shown_name(name), shown_name(key));
    }
  }
  for (const auto& [key, member] : {std::pair{"dtype", dtype}, {"shape", shape}, {"data_offsets", offsets}}) {
    if (member == nullptr) fail("{}: tensor {}: \"{}\" is missing", file, shown_name(name), key);
  }

  if (!dtype->is_string()) fail("{}: tensor {}: dtype is {}, expected a string", file, shown_name(name), shown(*dtype));
  const auto& type_name = dtype->get_ref<const std::string&>();
  const auto type = parse_dtype(type_name);
  if (!type && std::ranges::find(kUnsupported, type_name) != kUnsupported.end()) {
    fail("{}: tensor {}: dtype {} is unsupported; convert the file to F32, BF16 or F16", file, shown_name(name), type_name);
  }
  if (!type) fail("{}: tensor {}: no such dtype {}", file, shown_name(name), shown(*dtype));
  placed.view.dtype = *type;

  const auto is_size = [](const Json& number) {
    return number.is_number_unsigned() && number.get<std::uint64_t>() <= INT64_MAX;
  };
  if (!shape->is_array() || !std::all_of(shape->begin(), shape->end(), is_size)) {
    fail("{}: tensor {}: shape is {}, expected an array of sizes", file, shown_name(name), shown(*shape));
  }
  for (const auto& dimension : *shape) placed.view.shape.push_back(dimension.get<std::int64_t>());
  const auto num_bytes = bytes_of_shape(placed.view.shape, dtype_size(*type));
  if (!num_bytes) fail("{}: tensor {}: shape {} is too large", file, shown_name(name), shown(*shape));

  if (!offsets->is_array() || offsets->size() != 2 || !std::all_of(offsets->begin(), offsets->end(), is_size)) {
    fail("{}: tensor {}: data_offsets is {}, expected [begin, end]", file, shown_name(name), shown(*offsets));
  }
  placed.begin = (*offsets)[0].get<std::uint64_t>();
  placed.end = (*offsets)[1].get<std::uint64_t>();
  if (placed.begin > placed.end) {
    fail("{}: tensor {}: data_offsets {} end before they begin", file, shown_name(name), shown(*offsets));
  }
  if (placed.end - placed.begin != *num_bytes) {
    fail("{}: tensor {}: data_offsets {} hold {} bytes, expected {} for {} {}", file, shown_name(name), shown(*offsets),
         placed.end - placed.begin, *num_bytes, type_name, shown(*shape));
  }
  return placed;
}

// What a header says.
struct Header {
  std::vector<Placement> placed;
  std::map<std::string, std::string> metadata;
};

/// Any header, every fault of which is an error that names it.
Header read_header(std::string_view text, const std::string& file) {
  Json json;
  try {
    json = parse_json(text, file);
  } catch (const UserError& error) {
    fail("{}", file + tamed(std::string_view(error.what()).substr(file.size())));
  }
  Header header;
  header.placed.reserve(json.size());
  for (const auto& [name, value] : json.items()) {
    if (name != kMetadataKey) {
      header.placed.push_back(read_entry(file, name, value));
      continue;
    }
    if (!value.is_object()) fail("{}: {} is {}, expected an object of strings", file, kMetadataKey, shown(value));
    for (const auto& [key, member] : value.items()) {
      if (!member.is_string()) fail("{}: {}: {} is {}, expected a string", file, kMetadataKey, shown_name(key), shown(member));
      header.metadata.emplace(key, member.get<std::string>());
    }
  }
  return header;
}

bool read_plain_entry(PlainJsonReader& reader, std::string_view name, Placement& placed) {
  auto& view = placed.view;
  view.name = name;
  std::vector<std::int64_t> offsets;
  int num_dtypes = 0, num_shapes = 0, num_offsets = 0;
  const bool is_read = reader.members([&](std::string_view key) {
    if (key == "shape") return ++num_shapes == 1 && reader.sizes(view.shape);
    if (key == "data_offsets") return ++num_offsets == 1 && reader.sizes(offsets);
    std::string_view type_name;
    if (key != "dtype" || ++num_dtypes > 1 || !reader.string(type_name)) return false;
    const auto type = parse_dtype(type_name);
    view.dtype = type.value_or(DType::kF32);
    return type.has_value();
  });
  if (!is_read || num_dtypes + num_shapes + num_offsets != 3 || offsets.size() != 2) return false;
  placed.begin = static_cast<std::uint64_t>(offsets[0]);
  placed.end = static_cast<std::uint64_t>(offsets[1]);
  const auto num_bytes = bytes_of_shape(view.shape, dtype_size(view.dtype));
  return num_bytes && placed.begin <= placed.end && placed.end - placed.begin == *num_bytes;
}

/// A header as programs write it; nothing for all others, faulty ones among them, which are read_header's.
std::optional<Header> read_plain_header(std::string_view text) {
  PlainJsonReader reader(text);
  Header header;
  const auto num_expected = text.size() / 100;
  header.placed.reserve(num_expected);
  std::unordered_set<std::string_view> names(num_expected);
  const bool is_read = reader.members([&](std::string_view name) {
    if (!names.insert(name).second) return false;
    if (name != kMetadataKey) return read_plain_entry(reader, name, header.placed.emplace_back());
    return reader.members([&](std::string_view key) {
      std::string_view value;
      return reader.string(value) && header.metadata.emplace(key, value).second;
    });
  });
  if (!is_read || !reader.at_end()) return std::nullopt;
  return header;
}

}  // namespace

std::string_view dtype_name(DType dtype) { return entry(dtype).name; }
std::size_t dtype_size(DType dtype) { return entry(dtype).size; }

std::optional<DType> parse_dtype(std::string_view name) {
  const auto* found = std::ranges::find(kDTypes, name, &DTypeEntry::name);
  if (found == kDTypes.end()) return std::nullopt;
  return found->dtype;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape.begin(), shape.end(), ", "));
}

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  SafetensorsFile opened;
  opened.path_ = path;
  opened.mapping_ = std::make_unique<MappedFile>(path, "a safetensors file");
  opened.parse();
  return opened;
}

void SafetensorsFile::parse() {
  const auto file = path_.string();
  const auto bytes = mapping_->bytes();
  if (bytes.size() < kLengthBytes) {
    fail("{}: {} bytes, too short for a safetensors file; download or copy it again", file, bytes.size());
  }
  std::uint64_t header_size = 0;
  std::memcpy(&header_size, bytes.data(), kLengthBytes);
  const std::uint64_t after_length = bytes.size() - kLengthBytes;
  const std::string_view after(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, after_length);
  if (header_size > kMaxHeaderBytes) {
    fail("{}: no safetensors file: its header would be {} bytes long, expected at most {}", file, header_size,
         kMaxHeaderBytes);
  }
  if (header_size > after_length) {
    fail("{}: truncated: its header needs {} bytes, {} are there; download or copy it again", file,
         header_size + kLengthBytes, bytes.size());
  }
  const auto text = after.substr(0, header_size);
  if (!text.starts_with('{')) fail("{}: no safetensors file: its header does not start with \"{{\"", file);
  if (const auto zero = text.find('\0'); zero != std::string_view::npos) {  // a parser may take it for the end
    fail("{}: no safetensors file: its header holds a zero byte at {}", file, zero);
  }
  auto header = read_plain_header(text);
  if (!header) header = read_header(text, file);
  metadata_ = std::move(header->metadata);

  auto& placed = header->placed;
  const auto extent = [](const Placement& p) { return std::pair(p.begin, p.end); };
  if (!std::ranges::is_sorted(placed, {}, extent)) std::ranges::stable_sort(placed, {}, extent);
  const auto available = bytes.size() - kLengthBytes - header_size;
  std::uint64_t covered = 0;
  for (std::size_t i = 0; i < placed.size(); ++i) {
    const auto& [view, begin, end] = placed[i];
    if (begin < covered) {
      fail("{}: tensor {} overlaps {}: it begins at byte {} of the data, expected {}", file, shown_name(view.name),
           shown_name(placed[i - 1].view.name), begin, covered);
    }
    if (begin > covered) {
      fail("{}: tensor {} begins at byte {} of the data, expected {}: {} bytes belong to no tensor", file,
           shown_name(view.name), begin, covered, begin - covered);
    }
    covered = end;
  }
  if (covered > available) {
    const auto cut = std::ranges::find_if(placed, [&](const Placement& p) { return p.end > available; });
    fail("{}: truncated: {} bytes are there, expected {} (tensor {} is cut); download or copy it again", file,
         bytes.size(), covered + header_size + kLengthBytes, shown_name(cut->view.name));
  }
  if (covered < available) {
    fail("{}: {} bytes after the last tensor belong to none: {} bytes are there, expected {}; download or copy it again",
         file, available - covered, bytes.size(), covered + header_size + kLengthBytes);
  }

  const auto data = bytes.subspan(kLengthBytes + header_size);
  tensors_.reserve(placed.size());
  for (auto& [view, begin, end] : placed) {
    view.bytes = data.subspan(begin, end - begin);
    tensors_.push_back(std::move(view));
  }
  index_.reserve(tensors_.size());
  for (std::size_t i = 0; i < tensors_.size(); ++i) index_.emplace(tensors_[i].name, i);
}

const TensorView* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

std::string safetensors_header(std::span<const TensorHeader> tensors, const std::map<std::string, std::string>& metadata) {
  std::string text(kLengthBytes, '\0');
  text += '{';
  if (!metadata.empty()) text += fmt::format("\"{}\":{}", kMetadataKey, Json(metadata).dump());
  std::unordered_set<std::string_view> names{kMetadataKey};
  std::uint64_t offset = 0;
  for (const auto& tensor : tensors) {
    const auto num_bytes = bytes_of_shape(tensor.shape, dtype_size(tensor.dtype));
    if (!num_bytes || __builtin_add_overflow(offset, *num_bytes, &offset)) {
      throw std::invalid_argument(fmt::format("tensor \"{}\" of shape {} is too large", tensor.name, shape_text(tensor.shape)));
    }
    if (!names.insert(tensor.name).second) {
      throw std::invalid_argument(fmt::format("tensor name \"{}\" is taken twice", tensor.name));
    }
    text += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", text.size() == kLengthBytes + 1 ? "" : ",",
                        Json(tensor.name).dump(), dtype_name(tensor.dtype), fmt::join(tensor.shape, ","),
                        offset - *num_bytes, offset);
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');
  const std::uint64_t header_size = text.size() - kLengthBytes;
  if (header_size > kMaxHeaderBytes) {
    throw std::invalid_argument(fmt::format("the header would be {} bytes long", header_size));
  }
  std::memcpy(text.data(), &header_size, kLengthBytes);
  return text;
}

void write_safetensors(const std::filesystem::path& path, std::span<const TensorView> tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<const TensorView*> order;
  for (const auto& tensor : tensors) order.push_back(&tensor);
  const auto rank = [](const TensorView* t) { return &entry(t->dtype) - kDTypes.data(); };
  std::ranges::sort(order, [&](const TensorView* a, const TensorView* b) {
    return rank(a) != rank(b) ? rank(a) > rank(b) : a->name < b->name;
  });

  std::vector<TensorHeader> headers;
  for (const auto* tensor : order) {
    if (bytes_of_shape(tensor->shape, dtype_size(tensor->dtype)) != tensor->bytes.size()) {
      throw std::invalid_argument(fmt::format("{}: tensor \"{}\" holds {} bytes, which is not {} {}", path.string(),
                                              tensor->name, tensor->bytes.size(), dtype_name(tensor->dtype),
                                              shape_text(tensor->shape)));
    }
    headers.push_back({.name = tensor->name, .dtype = tensor->dtype, .shape = tensor->shape});
  }
  const auto header = safetensors_header(headers, metadata);
  write_file_with(path, [&](int fd) {
    write_all(fd, header.data(), header.size());
    for (const auto* tensor : order) {
      write_all(fd, reinterpret_cast<const char*>(tensor->bytes.data()), tensor->bytes.size());
    }
  });
}

}  // namespace mergex::io
