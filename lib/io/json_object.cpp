#include "io/json_object.h"

#include <cmath>

#include "core/error.h"
#include "core/one_line.h"
#include "core/suggest.h"

namespace mergex::io {
namespace fs = std::filesystem;

struct JsonObject::State {
  std::shared_ptr<const JsonDocument> document;
  const Json* value = nullptr;
  std::string pointer;
  std::shared_ptr<Json> resolved;  // the whole resolved document
  std::set<std::string, std::less<>> claimed;
  std::vector<std::string> known;  // in the order in which they were asked for
};

namespace {

const Json& empty_object() {
  static const Json empty = Json::object();
  return empty;
}

std::string range_text(const Range& range, bool integer) {
  const auto number = [&](double v) { return integer ? fmt::format("{:.0f}", v) : fmt::format("{:g}", v); };
  if (range.at_least && range.at_most) return fmt::format("{}..{}", number(*range.at_least), number(*range.at_most));
  std::string text;
  const auto add = [&](std::string part) { text += text.empty() ? part : " and " + part; };
  if (range.above) add(fmt::format("more than {}", number(*range.above)));
  if (range.at_least) add(fmt::format("at least {}", number(*range.at_least)));
  if (range.below) add(fmt::format("less than {}", number(*range.below)));
  if (range.at_most) add(fmt::format("at most {}", number(*range.at_most)));
  return text;
}

std::string place(const std::string& origin, const std::string& pointer) {
  if (pointer.empty()) return origin;
  // The origin may itself be a place in a file: "recipe.json#/model/config".
  return fmt::format("{}{}{}", origin, origin.find('#') == std::string::npos ? "#" : "", one_line(pointer));
}

}  // namespace

std::string escape_pointer(std::string_view key) {
  std::string escaped;
  for (const char c : key) {
    if (c == '~') {
      escaped += "~0";
    } else if (c == '/') {
      escaped += "~1";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

const std::string& JsonDocument::origin(const std::string& pointer) const {
  std::string prefix = pointer;
  while (true) {
    if (const auto found = origins.find(prefix); found != origins.end()) return found->second;
    const auto slash = prefix.rfind('/');
    if (slash == std::string::npos) return file;
    prefix.resize(slash);
  }
}

JsonObject::JsonObject(std::shared_ptr<const JsonDocument> document, std::shared_ptr<Json> resolved)
    : state_(std::make_shared<State>()) {
  state_->value = &document->value;
  state_->document = std::move(document);
  state_->resolved = std::move(resolved);
  if (state_->resolved && state_->resolved->is_null()) *state_->resolved = Json::object();
  if (!state_->value->is_object()) {
    fail("{}: got {}, expected a JSON object", where(), shown(*state_->value));
  }
}

std::string JsonObject::where(std::string_view key) const { return where(key, ""); }

std::string JsonObject::where(std::string_view key, std::string_view below) const {
  auto pointer = key.empty() ? state_->pointer : state_->pointer + "/" + escape_pointer(key);
  pointer += below;
  return place(state_->document->origin(pointer), pointer);
}

const Json* JsonObject::claim(std::string_view key) {
  state_->known.emplace_back(key);
  state_->claimed.emplace(key);
  const auto found = state_->value->find(std::string(key));
  if (found == state_->value->end()) return nullptr;
  return &*found;
}

void JsonObject::record(std::string_view key, Json value) {
  if (!state_->resolved) return;
  (*state_->resolved)[Json::json_pointer(state_->pointer + "/" + escape_pointer(key))] = std::move(value);
}

bool JsonObject::has(std::string_view key) const { return state_->value->contains(std::string(key)); }

const Json& JsonObject::peek(std::string_view key) const {
  static const Json null;
  const auto found = state_->value->find(std::string(key));
  return found == state_->value->end() ? null : *found;
}

void JsonObject::fail_missing(std::string_view key) const {
  fail("{}: \"{}\" is missing; add it", where(), key);
}

void JsonObject::fail_value(std::string_view key, std::string_view message) const {
  const auto& value = peek(key);
  if (value.is_null()) fail("{}: {}", where(key), message);
  fail("{}: got {}, {}", where(key), shown(value), message);
}

void JsonObject::check_range(std::string_view key, const Json& shown_value, double value, const Range& range) const {
  const bool inside = (!range.above || value > *range.above) && (!range.at_least || value >= *range.at_least) &&
                      (!range.below || value < *range.below) && (!range.at_most || value <= *range.at_most);
  if (!inside) {
    fail("{}: got {}, expected {}", where(key), shown(shown_value), range_text(range, shown_value.is_number_integer()));
  }
}

bool JsonObject::read(std::string_view key, bool& value, const Range&) {
  const auto* found = claim(key);
  if (found == nullptr) return false;
  if (!found->is_boolean()) fail_value(key, "expected true or false");
  value = found->get<bool>();
  record(key, *found);
  return true;
}

bool JsonObject::read(std::string_view key, std::int64_t& value, const Range& range) {
  const auto* found = claim(key);
  if (found == nullptr) return false;
  if (!found->is_number_integer()) fail_value(key, "expected a whole number");
  if (found->is_number_unsigned() && found->get<std::uint64_t>() > INT64_MAX) fail_value(key, "expected less than 2^63");
  value = found->get<std::int64_t>();
  check_range(key, *found, static_cast<double>(value), range);
  record(key, *found);
  return true;
}

bool JsonObject::read(std::string_view key, double& value, const Range& range) {
  const auto* found = claim(key);
  if (found == nullptr) return false;
  if (!found->is_number()) fail_value(key, "expected a number");
  value = found->get<double>();
  if (!std::isfinite(value)) fail_value(key, "expected a finite number");
  check_range(key, *found, value, range);
  record(key, *found);
  return true;
}

bool JsonObject::read(std::string_view key, std::string& value, const Range&) {
  const auto* found = claim(key);
  if (found == nullptr) return false;
  if (!found->is_string()) fail_value(key, "expected a string");
  value = found->get<std::string>();
  record(key, *found);
  return true;
}

bool JsonObject::read(std::string_view key, std::vector<std::int64_t>& value, const Range& range) {
  const auto* found = claim(key);
  if (found == nullptr) return false;
  if (!found->is_array()) fail_value(key, "expected an array of whole numbers");
  value.clear();
  for (const auto& item : *found) {
    if (!item.is_number_integer()) fail_value(key, "expected an array of whole numbers");
    value.push_back(item.get<std::int64_t>());
    check_range(key, item, static_cast<double>(value.back()), range);
  }
  record(key, *found);
  return true;
}

bool JsonObject::read(std::string_view key, std::vector<double>& value, const Range& range) {
  const auto* found = claim(key);
  if (found == nullptr) return false;
  if (!found->is_array()) fail_value(key, "expected an array of numbers");
  value.clear();
  for (const auto& item : *found) {
    if (!item.is_number()) fail_value(key, "expected an array of numbers");
    value.push_back(item.get<double>());
    check_range(key, item, value.back(), range);
  }
  record(key, *found);
  return true;
}

bool JsonObject::read(std::string_view key, std::vector<std::string>& value, const Range&) {
  const auto* found = claim(key);
  if (found == nullptr) return false;
  if (!found->is_array()) fail_value(key, "expected an array of strings");
  value.clear();
  for (const auto& item : *found) {
    if (!item.is_string()) fail_value(key, "expected an array of strings");
    value.push_back(item.get<std::string>());
  }
  record(key, *found);
  return true;
}

std::size_t JsonObject::choice(std::string_view key, std::span<const std::string> names, std::size_t fallback) {
  std::string name = names[fallback];
  optional(key, name);
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return i;
  }
  fail_value(key, fmt::format("expected {}{}", quoted_list(names), did_you_mean(name, names)));
}

std::optional<fs::path> JsonObject::path(std::string_view key) {
  std::string text;
  if (!read(key, text, {})) return std::nullopt;
  if (text.empty()) fail_value(key, "expected a path");
  auto result = absolute(text, state_->pointer + "/" + escape_pointer(key));
  record(key, result.string());
  return result;
}

fs::path JsonObject::absolute(const std::string& text, const std::string& pointer) const {
  const fs::path path = text;
  if (path.is_absolute()) return path;
  const auto& origin = state_->document->origin(pointer);
  const auto folder = origin.starts_with("--") ? fs::current_path() : fs::absolute(origin).parent_path();
  return (folder / path).lexically_normal();
}

std::vector<fs::path> JsonObject::paths(std::string_view key) {
  if (!peek(key).is_array()) {
    const auto one = path(key);
    return one ? std::vector{*one} : std::vector<fs::path>{};
  }
  std::vector<std::string> texts;
  read(key, texts, {});
  std::vector<fs::path> result;
  auto resolved = Json::array();
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (texts[i].empty()) fail_value(key, "expected an array of paths");
    result.push_back(absolute(texts[i], fmt::format("{}/{}/{}", state_->pointer, escape_pointer(key), i)));
    resolved.push_back(result.back().string());
  }
  record(key, std::move(resolved));
  return result;
}

fs::path JsonObject::required_path(std::string_view key) {
  auto found = path(key);
  if (!found) fail_missing(key);
  return *found;
}

JsonObject JsonObject::child(const Json& value, std::string pointer) const {
  auto state = std::make_shared<State>();
  state->document = state_->document;
  state->value = &value;
  state->pointer = std::move(pointer);
  state->resolved = state_->resolved;
  if (state->resolved) (*state->resolved)[Json::json_pointer(state->pointer)] = Json::object();
  return JsonObject(std::move(state));
}

std::optional<JsonObject> JsonObject::object(std::string_view key) {
  const auto* found = claim(key);
  if (found == nullptr) return std::nullopt;
  if (!found->is_object()) fail_value(key, "expected an object");
  return child(*found, state_->pointer + "/" + escape_pointer(key));
}

JsonObject JsonObject::required_object(std::string_view key) {
  auto found = object(key);
  if (!found) fail_missing(key);
  return *found;
}

JsonObject JsonObject::object_or_empty(std::string_view key) {
  if (auto found = object(key)) return *found;
  return child(empty_object(), state_->pointer + "/" + escape_pointer(key));
}

std::vector<JsonObject> JsonObject::objects(std::string_view key) {
  const auto* found = claim(key);
  if (found == nullptr) return {};
  std::vector<JsonObject> result;
  if (!found->is_array()) fail_value(key, "expected an array of objects");
  record(key, Json::array());
  for (const auto& item : *found) {
    if (!item.is_object()) fail_value(key, "expected an array of objects");
    result.push_back(child(item, fmt::format("{}/{}/{}", state_->pointer, escape_pointer(key), result.size())));
  }
  return result;
}

std::optional<Json> JsonObject::any(std::string_view key) {
  const auto* found = claim(key);
  if (found == nullptr) return std::nullopt;
  record(key, *found);
  return *found;
}

void JsonObject::finish() {
  for (const auto& [key, value] : state_->value->items()) {
    if (state_->claimed.contains(key)) continue;
    // Said of the object, as the file (and line) that gave the key.
    const auto& file = state_->document->origin(state_->pointer + "/" + escape_pointer(key));
    fail("{}: unknown key \"{}\"{}", place(file, state_->pointer), one_line(key), did_you_mean(key, state_->known));
  }
}

}  // namespace mergex::io
