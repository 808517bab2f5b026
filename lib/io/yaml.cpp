#include "io/yaml.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <memory>
#include <set>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "core/one_line.h"
#include "core/utf8.h"
#include "io/atomic_file.h"

namespace mergex::io {
namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{8} << 20;
constexpr std::size_t kMaxExpandedBytes = std::size_t{16} << 20;
constexpr std::size_t kMaxDepth = 64;

std::string place(const std::string& file, const YAML::Mark& mark) {
  return fmt::format("{}:{}:{}", file, mark.line + 1, mark.column + 1);
}

std::string cut(std::string_view text) {
  return one_line(text.size() > 60 ? std::string(text.substr(0, 57)) + "..." : std::string(text));
}

// --- scalars

bool is_one_of(std::string_view text, std::initializer_list<std::string_view> words) {
  return std::ranges::find(words, text) != words.end();
}

bool all_of(std::string_view text, std::string_view characters) {
  return text.find_first_not_of(characters) == std::string_view::npos;
}

constexpr std::string_view kDigits = "0123456789";

/// Forms that YAML 1.1 reads as another number than YAML 1.2, or as none: octal, binary, hexadecimal, base 60, grouped.
bool is_disputed_number(std::string_view digits) {
  if (digits.empty() || digits[0] < '0' || digits[0] > '9') return false;
  if (digits.size() > 1 && digits[0] == '0' && all_of(digits, "0123456789_")) return true;
  if (digits.starts_with("0x")) return digits.size() > 2 && all_of(digits.substr(2), "0123456789abcdefABCDEF_");
  if (digits.starts_with("0b")) return digits.size() > 2 && all_of(digits.substr(2), "01_");
  if (digits.find('_') != std::string_view::npos) return all_of(digits, "0123456789_.");
  if (digits.find(':') == std::string_view::npos || !all_of(digits, "0123456789:.")) return false;
  for (auto rest = digits.substr(0, digits.find('.')); !rest.empty();) {  // 1:30:05
    const auto part = rest.substr(0, rest.find(':'));
    const bool is_first = part.data() == digits.data();
    const bool is_below_60 = part.size() == 1 || (part.size() == 2 && part[0] < '6');
    if (part.empty() || (!is_first && !is_below_60)) return false;
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
  }
  return digits.back() != ':';
}

/// An unquoted scalar.
Json plain_scalar(const std::string& text, const std::string& where) {
  if (text.empty() || is_one_of(text, {"~", "null", "Null", "NULL"})) return nullptr;
  if (is_one_of(text, {"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})) return true;
  if (is_one_of(text, {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})) return false;

  std::string_view digits = text;
  if (digits[0] == '-' || digits[0] == '+') digits.remove_prefix(1);
  if (is_one_of(digits, {".inf", ".Inf", ".INF", ".nan", ".NaN", ".NAN"})) {
    fail("{}: got {}, expected a finite number", where, text);
  }
  if (is_disputed_number(digits)) {
    fail("{}: \"{}\" means different numbers in YAML 1.1 and 1.2; write it as a plain decimal number, or in quotes if "
         "it is a text", where, cut(text));
  }
  if (digits.empty() || !all_of(digits, "0123456789.eE+-") || digits.find_first_of(kDigits) == std::string_view::npos) {
    return text;
  }
  if (digits[0] == '-' || digits[0] == '+') return text;  // a second sign
  const char* begin = text.data() + (text[0] == '+' ? 1 : 0);
  const char* end = text.data() + text.size();
  if (all_of(digits, kDigits)) {
    std::int64_t integer = 0;
    if (std::from_chars(begin, end, integer).ec == std::errc()) return integer;
  }
  double number = 0;
  const auto [stop, error] = std::from_chars(begin, end, number);
  if (stop != end) return text;
  if (error != std::errc()) {
    fail("{}: \"{}\" is too large or too small for a number; put it in quotes if it is a text", where, cut(text));
  }
  return number;
}

// --- the file as a tree, aliases shared

struct Node {
  enum class Kind { kScalar, kSequence, kMapping };
  Kind kind = Kind::kScalar;
  YAML::Mark mark = {};
  Json scalar = {};
  bool is_quoted = false;
  std::vector<std::shared_ptr<const Node>> children = {};  // of a mapping: key, value, key, value ...
};

class TreeBuilder : public YAML::EventHandler {
 public:
  explicit TreeBuilder(std::string file) : file_(std::move(file)) {}

  /// nullptr where the document was empty.
  std::shared_ptr<const Node> take() {
    anchored_.clear();
    return std::exchange(root_, nullptr);
  }

  void OnDocumentStart(const YAML::Mark& mark) override {
    // At a stray "," or "]" the parser stands still and reads empty documents for ever.
    if (mark.pos <= last_start_) fail("{}: not valid YAML: a value was expected here", place(file_, mark));
    last_start_ = mark.pos;
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override { add({.mark = mark}, anchor); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto found = anchored_.find(anchor);
    if (found == anchored_.end()) fail("{}: the alias stands inside what it repeats", place(file_, mark));
    attach(found->second);
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    check_tag(mark, tag, "str");
    // The library turns \_ and \N into single bytes.
    if (!is_valid_utf8(value)) {
      fail("{}: an escape in the text makes no valid UTF-8; write it as \\u00A0 or \\u0085", place(file_, mark));
    }
    const bool is_plain = tag == "?" || tag.empty();
    add({.mark = mark,
         .scalar = is_plain ? plain_scalar(value, place(file_, mark)) : Json(value),
         .is_quoted = !is_plain},
        anchor);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    check_tag(mark, tag, "seq");
    open({.kind = Node::Kind::kSequence, .mark = mark}, anchor);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    check_tag(mark, tag, "map");
    open({.kind = Node::Kind::kMapping, .mark = mark}, anchor);
  }
  void OnMapEnd() override { close(); }

 private:
  struct Open {
    std::shared_ptr<Node> node;
    YAML::anchor_t anchor;
  };

  void check_tag(const YAML::Mark& mark, const std::string& tag, std::string_view expected) const {
    constexpr std::string_view kStandard = "tag:yaml.org,2002:";
    if (tag.empty() || tag == "?" || tag == "!") return;
    if (tag.starts_with(kStandard) && std::string_view(tag).substr(kStandard.size()) == expected) return;
    fail("{}: tag \"{}\" is not understood here; remove it", place(file_, mark), cut(tag));
  }
  void attach(std::shared_ptr<const Node> node) {
    if (open_.empty()) {
      root_ = std::move(node);
    } else {
      open_.back().node->children.push_back(std::move(node));
    }
  }
  void add(Node node, YAML::anchor_t anchor) {
    auto shared = std::make_shared<const Node>(std::move(node));
    if (anchor != YAML::NullAnchor) anchored_[anchor] = shared;
    attach(std::move(shared));
  }
  void open(Node node, YAML::anchor_t anchor) {
    if (open_.size() >= kMaxDepth) fail("{}: nested more than {} levels deep", place(file_, node.mark), kMaxDepth);
    open_.push_back({std::make_shared<Node>(std::move(node)), anchor});
  }
  void close() {
    const auto [node, anchor] = std::move(open_.back());
    open_.pop_back();
    if (anchor != YAML::NullAnchor) anchored_[anchor] = node;
    attach(node);
  }

  std::string file_;
  int last_start_ = -1;  // of the document before
  std::shared_ptr<const Node> root_;
  std::vector<Open> open_;
  std::unordered_map<YAML::anchor_t, std::shared_ptr<const Node>> anchored_;
};

// --- the tree as JSON

class Expander {
 public:
  explicit Expander(JsonDocument& document) : document_(document) {}

  Json expand(const Node& node, const std::string& pointer, std::size_t depth = 0) {
    if (depth > kMaxDepth) fail_at(node, "nested more than {} levels deep", kMaxDepth);
    auto origin = fmt::format("{}:{}", document_.file, node.mark.line + 1);
    spend(node, pointer.size() + origin.size() + 64);
    if (!pointer.empty()) document_.origins.emplace(pointer, std::move(origin));
    switch (node.kind) {
      case Node::Kind::kScalar:
        if (node.scalar.is_string()) spend(node, node.scalar.get_ref<const std::string&>().size());
        return node.scalar;
      case Node::Kind::kSequence: {
        auto array = Json::array();
        for (const auto& child : node.children) {
          array.push_back(expand(*child, fmt::format("{}/{}", pointer, array.size()), depth + 1));
        }
        return array;
      }
      case Node::Kind::kMapping: break;
    }
    auto object = Json::object();
    auto& members = object.get_ref<Json::object_t&>();
    for (const auto& [key, value] : members_of(node, depth)) {
      const auto& name = key->scalar.get_ref<const std::string&>();
      const auto member = fmt::format("{}/{}", pointer, escape_pointer(name));
      members.push_back({name, expand(*value, member, depth + 1)});
      // The line of the key, not that of a value that begins below it.
      document_.origins[member] = fmt::format("{}:{}", document_.file, key->mark.line + 1);
    }
    return object;
  }

 private:
  struct Member {
    const Node *key, *value;
  };

  template <class... Args>
  [[noreturn]] void fail_at(const Node& node, fmt::format_string<Args...> format, Args&&... args) const {
    fail("{}: {}", place(document_.file, node.mark), fmt::format(format, std::forward<Args>(args)...));
  }

  void spend(const Node& node, std::size_t num_bytes) {
    spent_ += num_bytes;
    if (spent_ > kMaxExpandedBytes) fail_at(node, "expands to more than {} MiB; repeat less", kMaxExpandedBytes >> 20);
  }

  /// Those that stand in the mapping, then those of `<<: *defaults` or `<<: [*a, *b]` that it does not have yet.
  std::vector<Member> members_of(const Node& mapping, std::size_t depth) {
    if (depth > kMaxDepth) fail_at(mapping, "nested more than {} levels deep", kMaxDepth);
    std::vector<Member> members;
    std::map<std::string_view, const Node*> key_of;
    std::vector<const Node*> merged;
    for (std::size_t i = 0; i + 1 < mapping.children.size(); i += 2) {
      const auto &key = *mapping.children[i], &value = *mapping.children[i + 1];
      if (key.kind != Node::Kind::kScalar) fail_at(key, "a key is a list or a mapping, expected a text");
      if (!key.scalar.is_string()) {
        fail_at(key, "a key is read as {}, expected a text; put it in quotes", key.scalar.dump());
      }
      const auto& name = key.scalar.get_ref<const std::string&>();
      spend(key, name.size() + 64);
      if (name == "<<" && !key.is_quoted) {
        merged.push_back(&value);
      } else if (const auto [first, is_new] = key_of.emplace(name, &key); is_new) {
        members.push_back({&key, &value});
      } else {
        fail_at(key, "key \"{}\" given twice, first in line {}; keep one", cut(name), first->second->mark.line + 1);
      }
    }
    for (std::size_t i = 0; i < merged.size(); ++i) {
      const auto& source = *merged[i];
      if (source.kind == Node::Kind::kSequence) {
        for (const auto& child : source.children) {
          if (child->kind != Node::Kind::kMapping) fail_at(*child, "<< takes a mapping or a list of mappings");
          merged.push_back(child.get());
        }
        continue;
      }
      if (source.kind != Node::Kind::kMapping) fail_at(source, "<< takes a mapping or a list of mappings");
      for (const auto& member : members_of(source, depth + 1)) {
        if (key_of.emplace(member.key->scalar.get_ref<const std::string&>(), member.key).second) {
          members.push_back(member);
        }
      }
    }
    return members;
  }

  JsonDocument& document_;
  std::size_t spent_ = 0;
};

}  // namespace

std::vector<JsonDocument> parse_yaml(std::string_view text, const std::string& file) {
  if (text.size() > kMaxFileBytes) {
    fail("{}: {} bytes, expected a YAML file of at most {} MiB", file, text.size(), kMaxFileBytes >> 20);
  }
  if (const auto at = std::min(invalid_utf8_at(text).value_or(text.size()), text.find('\0')); at < text.size()) {
    const auto before = text.substr(0, at);
    const auto line_start = before.rfind('\n') + 1;  // npos + 1 is 0
    fail("{}:{}:{}: not valid UTF-8 text; save the file as UTF-8", file, 1 + std::ranges::count(before, '\n'),
         1 + at - line_start);
  }
  std::vector<JsonDocument> documents;
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    TreeBuilder builder(file);
    while (parser.HandleNextDocument(builder)) {
      const auto root = builder.take();
      if (!root || (root->kind == Node::Kind::kScalar && root->scalar.is_null())) continue;
      auto& document = documents.emplace_back();
      document.file = file;
      document.value = Expander(document).expand(*root, "");
    }
  } catch (const YAML::Exception& error) {
    const auto what = std::string_view(error.msg).substr(0, error.msg.find(": "));  // behind it, a piece of the file
    fail("{}: not valid YAML: {}", place(file, error.mark), cut(what));
  }
  return documents;
}

std::vector<JsonDocument> read_yaml(const std::filesystem::path& path) {
  auto documents = parse_yaml(read_file(path), path.string());
  if (documents.empty()) fail("{}: holds no YAML document", path.string());
  return documents;
}

}  // namespace mergex::io
