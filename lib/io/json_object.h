#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/json.h"

namespace mergex::io {

/// Bounds of a number; those that are not set do not bind. `{.above = 0.0, .at_most = 1.0}` is (0, 1].
struct Range {
  std::optional<double> above = {}, at_least = {}, below = {}, at_most = {};
};

/// A JSON document and where its parts came from, for messages and for relative paths.
struct JsonDocument {
  Json value;
  std::string file;                             ///< origin of everything that `origins` does not name
  std::map<std::string, std::string> origins;   ///< JSON pointer -> the file ("r.yaml:12", "--set") that gave this value

  /// File of the longest prefix of `pointer`.
  const std::string& origin(const std::string& pointer) const;
};

/// The one way to read options: every key is claimed once, `finish()` rejects the rest with a suggestion, numbers
/// are never converted silently, and what was read (defaults filled in, paths made absolute) is recorded so that
/// the resolved recipe is exactly what the program used. Copies share the state of one object.
///
/// All members throw UserError "<file>#<pointer>: got <found>, expected <what>".
class JsonObject {
 public:
  /// The root of a document. @param resolved  receives what is read; may be null
  explicit JsonObject(std::shared_ptr<const JsonDocument> document, std::shared_ptr<Json> resolved = nullptr);

  // T: bool, std::int64_t, double, std::string, std::vector of the last three
  template <class T>
  T required(std::string_view key, const Range& range = {}) {
    T value{};
    if (!read(key, value, range)) fail_missing(key);
    return value;
  }
  /// Leaves `value` as it is where the key is absent. @return whether it was present
  template <class T>
  bool optional(std::string_view key, T& value, const Range& range = {}) {
    const bool present = read(key, value, range);
    if (!present) record(key, Json(value));
    return present;
  }
  /// Absent stays absent.
  template <class T>
  std::optional<T> maybe(std::string_view key, const Range& range = {}) {
    T value{};
    if (read(key, value, range)) return value;
    return std::nullopt;
  }

  /// One of a fixed set of names. @return its index
  std::size_t choice(std::string_view key, std::span<const std::string> names, std::size_t fallback);

  /// A path, made absolute relative to the file that names it ("--set": to the working directory).
  std::optional<std::filesystem::path> path(std::string_view key);
  std::filesystem::path required_path(std::string_view key);
  /// One path or an array of them, each made absolute like `path`; empty where the key is absent.
  std::vector<std::filesystem::path> paths(std::string_view key);

  std::optional<JsonObject> object(std::string_view key);
  JsonObject required_object(std::string_view key);
  /// As `object`, but an absent one reads like an empty one (so that its defaults are recorded).
  JsonObject object_or_empty(std::string_view key);
  /// An array of objects; empty where the key is absent.
  std::vector<JsonObject> objects(std::string_view key);
  /// Any value, claimed whole; recorded as it is.
  std::optional<Json> any(std::string_view key);

  bool has(std::string_view key) const;
  /// Type of the value under `key` without claiming it; null where absent.
  const Json& peek(std::string_view key) const;

  /// Rejects every key that nobody claimed.
  void finish();

  /// `recipe.json#/training/batch_size`
  std::string where(std::string_view key = {}) const;
  /// The same for a part of a value that was claimed whole. @param below  JSON pointer from that value on: "/weight/0"
  std::string where(std::string_view key, std::string_view below) const;
  /// `<where>: got <value>, <message>`
  [[noreturn]] void fail_value(std::string_view key, std::string_view message) const;

 private:
  struct State;
  explicit JsonObject(std::shared_ptr<State> state) : state_(std::move(state)) {}

  bool read(std::string_view key, bool& value, const Range&);
  bool read(std::string_view key, std::int64_t& value, const Range& range);
  bool read(std::string_view key, double& value, const Range& range);
  bool read(std::string_view key, std::string& value, const Range&);
  bool read(std::string_view key, std::vector<std::int64_t>& value, const Range& range);
  bool read(std::string_view key, std::vector<double>& value, const Range& range);
  bool read(std::string_view key, std::vector<std::string>& value, const Range&);

  JsonObject child(const Json& value, std::string pointer) const;
  const Json* claim(std::string_view key);
  void record(std::string_view key, Json value);
  std::filesystem::path absolute(const std::string& text, const std::string& pointer) const;
  [[noreturn]] void fail_missing(std::string_view key) const;
  void check_range(std::string_view key, const Json& shown_value, double value, const Range& range) const;

  std::shared_ptr<State> state_;
};

/// Makes `key` safe inside a JSON pointer (RFC 6901).
std::string escape_pointer(std::string_view key);

}  // namespace mergex::io
