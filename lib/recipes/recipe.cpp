#include "recipes/recipe.h"

#include <algorithm>
#include <cctype>
#include <set>

#include "core/error.h"
#include "core/one_line.h"
#include "core/utf8.h"

namespace mergex::recipes {
namespace fs = std::filesystem;
using io::Json;

namespace {

/// The values of a sweep's axis stand for themselves: a null among them is a value.
bool is_axis(const std::string& pointer) {
  return pointer.starts_with("/sweep/") && pointer.find('/', std::string_view("/sweep/").size()) == std::string::npos;
}

void merge_at(Json& target, const Json& patch, const std::string& pointer, const std::string& origin,
              std::map<std::string, std::string>& origins) {
  if (!patch.is_object() || is_axis(pointer)) {
    target = patch;
    origins[pointer] = origin;
    return;
  }
  if (!target.is_object()) {
    target = Json::object();
    origins[pointer] = origin;
  }
  for (const auto& [key, value] : patch.items()) {
    const auto place = pointer + "/" + io::escape_pointer(key);
    if (value.is_null()) {
      target.erase(key);
    } else {
      merge_at(target[key], value, place, origin, origins);
    }
  }
}

void read_with_bases(const fs::path& file, std::vector<fs::path>& open, io::JsonDocument& document) {
  std::error_code none;
  const auto canonical = fs::weakly_canonical(file, none);
  if (std::ranges::find(open, canonical) != open.end()) {
    fail("{}#/extends: extends itself by way of {}; break the circle", file.string(), open.back().string());
  }
  open.push_back(canonical);
  auto json = io::read_json(file);
  if (!json.is_object()) fail("{}: got {}, expected a JSON object", file.string(), io::shown(json));
  if (const auto base = json.find("extends"); base != json.end()) {
    if (!base->is_string()) fail("{}#/extends: got {}, expected a file name", file.string(), io::shown(*base));
    read_with_bases((file.parent_path() / base->get<std::string>()).lexically_normal(), open, document);
    json.erase("extends");
  }
  merge_patch(document, json, file.string());
  open.pop_back();
}

void apply_set(io::JsonDocument& document, const std::string& assignment, const std::string& origin) {
  const auto equals = assignment.find('=');
  if (!is_valid_utf8(assignment)) fail("{}: got {}, which is not valid UTF-8", origin, io::shown(assignment));
  if (equals == std::string::npos || !assignment.starts_with('/')) {
    fail("{}: got {}, expected /pointer=value, for example /training/batch_size=8", origin, io::shown(assignment));
  }
  const auto pointer = assignment.substr(0, equals);
  const auto text = assignment.substr(equals + 1);
  Json value;
  if (Json::accept(text)) {
    value = io::parse_json(text, origin + " " + one_line(pointer));
  } else {
    value = text;
  }
  // As a patch, so that missing parents come into being and null deletes.
  Json::json_pointer place;
  try {
    place = Json::json_pointer(pointer);
  } catch (const Json::exception&) {
    fail("{}: {} is no JSON pointer", origin, io::shown(pointer));
  }
  std::vector<std::string> keys;
  for (; !place.empty(); place.pop_back()) keys.push_back(place.back());
  Json patch = value;
  for (const auto& key : keys) {
    Json outer = Json::object();
    outer[key] = std::move(patch);
    patch = std::move(outer);
  }
  // What is set replaces: a patch alone would merge an object into the one that is there.
  if (value.is_object() && document.value.contains(Json::json_pointer(pointer))) {
    document.value[Json::json_pointer(pointer)] = Json::object();
  }
  merge_patch(document, patch, origin);
}

std::string slug(const std::string& label) {
  std::string result;
  for (const char c : label) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '-' || c == '_') {
      result += c;
    } else if (!result.empty() && result.back() != '-') {
      result += '-';
    }
  }
  while (!result.empty() && result.back() == '-') result.pop_back();
  return result.empty() ? "value" : result.substr(0, 60);
}

struct Choice {
  std::string label;
  Json value;
};

std::vector<Choice> choices_of(const Json& axis, const std::string& where) {
  std::vector<Choice> choices;
  if (axis.is_array()) {
    for (const auto& value : axis) {
      choices.push_back({value.is_string() ? value.get<std::string>() : io::shown(value), value});
    }
  } else if (axis.is_object()) {
    for (const auto& [label, value] : axis.items()) choices.push_back({label, value});
  } else {
    fail("{}: got {}, expected an array of values or an object of label: value", one_line(where), io::shown(axis));
  }
  if (choices.empty()) fail("{}: is empty; give at least one value", one_line(where));
  return choices;
}

}  // namespace

void merge_patch(io::JsonDocument& target, const Json& patch, const std::string& origin) {
  merge_at(target.value, patch, "", origin, target.origins);
}

Recipe changed_recipe(io::JsonDocument document, std::span<const std::string> sets, std::optional<std::int64_t> seed) {
  Recipe recipe{.file = document.file, .name = fs::path(document.file).stem().string(),
                .document = std::make_shared<io::JsonDocument>(std::move(document))};
  for (const auto& assignment : sets) apply_set(*recipe.document, assignment, "--set");
  const auto& value = recipe.document->value;
  if (seed) {
    if (const auto sweep = value.find("sweep"); sweep != value.end() && sweep->is_object() && sweep->contains("/seed")) {
      fail("--seed: the recipe sweeps over /seed; use --set '/sweep/~1seed=[{}]'", *seed);
    }
    apply_set(*recipe.document, fmt::format("/seed={}", *seed), "--seed");
  }
  if (const auto name = value.find("name"); name != value.end() && name->is_string()) recipe.name = name->get<std::string>();
  return recipe;
}

Recipe read_recipe(const fs::path& file, std::span<const std::string> sets, std::optional<std::int64_t> seed) {
  io::JsonDocument document{.value = Json::object(), .file = file.string(), .origins = {}};
  std::vector<fs::path> open;
  read_with_bases(file, open, document);
  return changed_recipe(std::move(document), sets, seed);
}

std::vector<SweepRow> expand_sweep(const Recipe& recipe) {
  auto base = std::make_shared<io::JsonDocument>(*recipe.document);
  Json sweep = Json::object();
  const auto where = fmt::format("{}#/sweep", base->origin("/sweep"));
  if (const auto found = base->value.find("sweep"); found != base->value.end()) {
    sweep = *found;
    if (!sweep.is_object()) fail("{}: got {}, expected an object of pointer: values", where, io::shown(sweep));
    base->value.erase("sweep");
  }
  std::vector<SweepRow> rows(1);
  rows[0].document = base;
  for (const auto& [pointer, axis] : sweep.items()) {
    // An axis may come from another file (or the command line) than the sweep that it joins.
    const auto& origin = base->origin("/sweep/" + io::escape_pointer(pointer));
    const auto place = fmt::format("{}#/sweep/{}", origin, io::escape_pointer(pointer));
    if (!pointer.starts_with('/')) fail("{}: expected a JSON pointer such as /seed", one_line(place));
    std::vector<SweepRow> longer;
    for (const auto& row : rows) {
      for (const auto& [label, value] : choices_of(axis, place)) {
        auto next = row;
        next.document = std::make_shared<io::JsonDocument>(*row.document);
        apply_set(*next.document, fmt::format("{}={}", pointer, value.dump()), origin);
        next.labels.emplace_back(pointer, label);
        longer.push_back(std::move(next));
      }
    }
    rows = std::move(longer);
  }
  std::set<std::string> folders;
  for (auto& row : rows) {
    for (const auto& [pointer, label] : row.labels) {
      const bool is_seed = pointer == "/seed";
      if (!is_seed) row.group += (row.group.empty() ? "" : ", ") + label;
      row.folder += (row.folder.empty() ? "" : ".") + (is_seed ? "seed-" + slug(label) : slug(label));
    }
    if (!folders.insert(row.folder).second) {
      fail("{}: two rows would both be called \"{}\"; give them labels", where, row.folder);
    }
  }
  return rows;
}

}  // namespace mergex::recipes
