#include "io/json.h"

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/one_line.h"
#include "io/atomic_file.h"

namespace mergex::io {
namespace {

constexpr int kMaxDepth = 200;  // nlohmann's destructor recurses: a deeper file would overflow the stack

// Builds the value while parsing, since nlohmann's own parser lets the last of two equal keys win silently.
class StrictReader : public nlohmann::json_sax<Json> {
 public:
  StrictReader(std::string_view text, std::string origin) : text_(text), origin_(std::move(origin)) {}

  Json take() { return std::move(root_); }

  bool null() override { return put(nullptr); }
  bool boolean(bool v) override { return put(v); }
  bool number_integer(number_integer_t v) override { return put(v); }
  bool number_unsigned(number_unsigned_t v) override { return put(v); }
  bool number_float(number_float_t v, const string_t&) override { return put(v); }
  bool string(string_t& v) override { return put(v); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    // Looked up in a set of its own: an ordered object finds keys one by one, which a file with 100,000 keys
    // would turn into minutes.
    if (!keys_.back().insert(name).second) fail("{}#{}/{}: key given twice; keep one", origin_, one_line(pointer()),
                                                 one_line(name));
    keys_in_order_.back() = name;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    const auto before = text_.substr(0, std::min(position > 0 ? position - 1 : 0, text_.size()));
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const auto line_start = before.rfind('\n');
    const auto column = before.size() - (line_start == std::string_view::npos ? 0 : line_start + 1) + 1;
    std::string what = error.what();
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while ..." -> the last part
    if (const auto at = what.find(": "); at != std::string::npos) what = what.substr(at + 2);
    std::replace(what.begin(), what.end(), '\n', ' ');
    fail("{}:{}:{}: not valid JSON: {}", origin_, line, column, what);
  }

 private:
  template <class T>
  bool put(T&& value) {
    if (open_.empty()) {
      root_ = std::forward<T>(value);
    } else if (auto& parent = *open_.back(); parent.is_array()) {
      parent.push_back(std::forward<T>(value));
    } else {
      append(parent, Json(std::forward<T>(value)));
    }
    return true;
  }

  Json& append(Json& object, Json value) {
    // push_back on the underlying vector: the key is known to be new.
    auto& members = object.get_ref<Json::object_t&>();
    members.push_back({keys_in_order_.back(), std::move(value)});
    return members.back().second;
  }

  bool open(Json container) {
    if (open_.size() >= kMaxDepth) fail("{}: nested more than {} levels deep", origin_, kMaxDepth);
    Json* opened = nullptr;
    if (open_.empty()) {
      root_ = std::move(container);
      opened = &root_;
    } else if (auto& parent = *open_.back(); parent.is_array()) {
      parent.push_back(std::move(container));
      opened = &parent.back();
    } else {
      opened = &append(parent, std::move(container));
    }
    open_.push_back(opened);
    keys_.emplace_back();
    keys_in_order_.emplace_back();
    return true;
  }

  bool close() {
    open_.pop_back();
    keys_.pop_back();
    keys_in_order_.pop_back();
    return true;
  }

  std::string pointer() const {
    std::string path;
    for (std::size_t i = 0; i + 1 < open_.size(); ++i) {
      path += "/";
      path += open_[i]->is_array() ? std::to_string(open_[i]->size() - 1) : keys_in_order_[i];
    }
    return path;
  }

  std::string_view text_;
  std::string origin_;
  Json root_;
  std::vector<Json*> open_;
  std::vector<std::unordered_set<std::string>> keys_;
  std::vector<std::string> keys_in_order_;  // per open container: the key that was read last
};

}  // namespace

Json parse_json(std::string_view text, const std::string& origin) {
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  // The parser takes a NUL for the end of its input and would not look at what stands behind it.
  if (text.find('\0') != std::string_view::npos) fail("{}: not valid JSON: holds a NUL byte", origin);
  StrictReader reader(text, origin);
  Json::sax_parse(text.begin(), text.end(), &reader);
  return reader.take();
}

Json read_json(const std::filesystem::path& path) { return parse_json(read_file(path), path.string()); }

void write_json(const std::filesystem::path& path, const Json& value) {
  write_file(path, value.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

std::string shown(const Json& value) {
  auto text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

}  // namespace mergex::io
