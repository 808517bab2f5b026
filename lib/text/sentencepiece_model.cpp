#include "text/sentencepiece_model.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <unordered_set>
#include <vector>

#include "core/error.h"
#include "core/utf8.h"
#include "io/atomic_file.h"

namespace mergex::text {
namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{16} << 20;  // the largest published models have 5 MB
constexpr std::size_t kMaxPieceBytes = 1024;
constexpr float kMaxScore = 1e30f;  // sums of scores must stay finite

// One field of a protocol buffer message (protobuf.dev, "Encoding").
struct Field {
  std::uint64_t number = 0;
  int wire_type = 0;
  std::uint64_t value = 0;     // varint, fixed64, fixed32
  std::string_view content;    // length-delimited
};

constexpr int kVarint = 0, kFixed64 = 1, kDelimited = 2, kFixed32 = 5;

class FieldReader {
 public:
  explicit FieldReader(std::string_view message) : rest_(message) {}

  /// False at the end and where the message is broken.
  bool next(Field& field) {
    if (rest_.empty()) return false;
    const auto tag = varint();
    field = {.number = tag >> 3, .wire_type = static_cast<int>(tag & 7), .value = 0, .content = {}};
    if (field.number == 0) broken_ = true;
    if (field.wire_type == kVarint) {
      field.value = varint();
    } else if (field.wire_type == kFixed64 || field.wire_type == kFixed32) {
      const auto bytes = take(field.wire_type == kFixed64 ? 8 : 4);
      if (!broken_) std::memcpy(&field.value, bytes.data(), bytes.size());
    } else if (field.wire_type == kDelimited) {
      field.content = take(varint());
    } else {
      broken_ = true;  // groups, which no version of the format has
    }
    return !broken_;
  }
  bool broken() const { return broken_; }

 private:
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      value |= std::uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return value;
    }
    broken_ = true;
    return 0;
  }
  std::string_view take(std::uint64_t size) {
    if (size > rest_.size()) {
      broken_ = true;
      return {};
    }
    const auto taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  std::string_view rest_;
  bool broken_ = false;
};

// The normaliser's rules: 4 bytes size of the trie, the trie (a double array of 32-bit units, Darts), then the
// replacements, each ended by a zero byte, to which the trie's values are offsets.
std::string charsmap_fault(std::string_view map) {
  if (map.empty()) return {};
  const std::string fault = "its normalisation table is damaged";
  std::uint32_t trie_bytes = 0;
  if (map.size() <= sizeof trie_bytes) return fault;
  std::memcpy(&trie_bytes, map.data(), sizeof trie_bytes);
  map.remove_prefix(sizeof trie_bytes);
  if (trie_bytes % 4 != 0 || trie_bytes == 0 || trie_bytes >= map.size()) return fault;
  std::vector<std::uint32_t> units(trie_bytes / 4);
  std::memcpy(units.data(), map.data(), trie_bytes);
  const auto replacements = map.substr(trie_bytes);
  if (replacements.back() != '\0' || invalid_utf8_at(replacements)) return fault;

  const auto offset = [](std::uint32_t unit) { return (unit >> 10) << ((unit & (1u << 9)) >> 6); };
  for (std::size_t i = 0; i < units.size(); ++i) {
    const bool is_value = (units[i] >> 31) != 0;  // a value is never walked from, except that the root always is
    if (is_value && i != 0) continue;
    const std::size_t children = i ^ offset(units[i]);
    if ((children | 0xFF) >= units.size()) return fault;
    const bool has_value = ((units[i] >> 8) & 1) != 0;
    if (!has_value) continue;
    const std::size_t replacement = units[children] & 0x7FFFFFFF;
    if (replacement >= replacements.size()) return fault;
    if ((static_cast<unsigned char>(replacements[replacement]) & 0xC0) == 0x80) return fault;  // inside a character
  }
  return {};
}

std::string normalizer_fault(std::string_view message) {
  FieldReader reader(message);
  Field field;
  while (reader.next(field)) {
    if (field.number != 2 || field.wire_type != kDelimited) continue;
    if (auto fault = charsmap_fault(field.content); !fault.empty()) return fault;
  }
  return reader.broken() ? "its normalisation section is damaged" : "";
}

std::optional<SentencePiece> read_piece(std::string_view message) {
  SentencePiece piece;
  FieldReader reader(message);
  Field field;
  while (reader.next(field)) {
    if (field.number == 1 && field.wire_type == kDelimited) piece.text = field.content;
    if (field.number == 2 && field.wire_type == kFixed32) {
      piece.score = std::bit_cast<float>(static_cast<std::uint32_t>(field.value));
    }
    if (field.number == 3 && field.wire_type == kVarint && field.value >= 1 && field.value <= 6) {
      piece.type = static_cast<SentencePiece::Type>(field.value);
    }
  }
  if (reader.broken()) return std::nullopt;
  return piece;
}

std::string piece_fault(const SentencePiece& piece) {
  if (piece.text.empty()) return "is empty";
  if (piece.text.size() > kMaxPieceBytes) {
    return fmt::format("is {} bytes long, expected at most {}", piece.text.size(), kMaxPieceBytes);
  }
  if (invalid_utf8_at(piece.text)) return "is not valid UTF-8";
  if (piece.text.find('\0') != std::string::npos) return "holds a zero byte";
  if (!(std::abs(piece.score) <= kMaxScore)) return "has no finite score";
  return {};
}

// What kind of model it is, as it was trained.
std::string trainer_fault(std::string_view message) {
  constexpr std::array kKinds{"unigram", "bpe", "word", "char"};
  std::uint64_t kind = 1;
  bool has_byte_fallback = false;
  FieldReader reader(message);
  Field field;
  while (reader.next(field)) {
    if (field.wire_type != kVarint) continue;
    if (field.number == 3 && field.value >= 1 && field.value <= kKinds.size()) kind = field.value;
    if (field.number == 35) has_byte_fallback = field.value != 0;
  }
  if (reader.broken()) return "its training section is damaged";
  if (kind != 1) return fmt::format("its type is {}, expected unigram", kKinds[kind - 1]);
  if (has_byte_fallback) return "it falls back to bytes, expected a model trained with byte_fallback=false";
  return {};
}

std::string read_pieces(std::string_view serialized, std::vector<SentencePiece>& pieces) {
  FieldReader reader(serialized);
  Field field;
  while (reader.next(field)) {
    if (field.wire_type != kDelimited) continue;
    std::string fault;
    if (field.number == 1) {
      const auto piece = read_piece(field.content);
      fault = piece ? piece_fault(*piece) : "is damaged";
      if (!fault.empty()) return fmt::format("piece {} {}", pieces.size(), fault);
      pieces.push_back(*piece);
    } else if (field.number == 2) {
      fault = trainer_fault(field.content);
    } else if (field.number == 3 || field.number == 5) {
      fault = normalizer_fault(field.content);
    }
    if (!fault.empty()) return fault;
  }
  if (reader.broken()) return "its structure is damaged or cut off";
  if (pieces.empty()) return "it holds no pieces";
  std::unordered_set<std::string_view> seen;
  for (const auto& piece : pieces) {
    if (!seen.insert(piece.text).second) return fmt::format("piece {} is a repetition", seen.size());
  }
  return {};
}

}  // namespace

SentencePieceModel read_sentencepiece_model(const std::filesystem::path& path) {
  std::error_code ignored;
  if (const auto size = std::filesystem::file_size(path, ignored); !ignored && size > kMaxFileBytes) {
    fail("{}: no T5 tokenizer model: {} bytes, expected at most {}", path.string(), size, kMaxFileBytes);
  }
  SentencePieceModel model{.serialized = io::read_file(path), .pieces = {}};
  if (const auto fault = read_pieces(model.serialized, model.pieces); !fault.empty()) {
    fail("{}: no T5 tokenizer model: {}; download or copy it again", path.string(), fault);
  }
  return model;
}

}  // namespace mergex::text
