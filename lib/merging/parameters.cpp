#include "merging/parameters.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "core/suggest.h"
#include "merging/names.h"

namespace mergex::merging {
namespace {

using io::Json;

std::string range_text(const io::Range& range) {
  std::string text;
  const auto add = [&](const char* word, std::optional<double> bound) {
    if (bound) text += fmt::format("{}{} {}", text.empty() ? "" : " and ", word, *bound);
  };
  add("above", range.above);
  add("at least", range.at_least);
  add("below", range.below);
  add("at most", range.at_most);
  return text;
}

bool contains(const io::Range& range, double value) {
  return !(range.above && value <= *range.above) && !(range.at_least && value < *range.at_least) &&
         !(range.below && value >= *range.below) && !(range.at_most && value > *range.at_most);
}

double read_value(const Parameter& parameter, const Json& value, const std::string& where) {
  switch (parameter.kind) {
    case Parameter::Kind::kNumber: {
      if (!value.is_number()) fail("{}: got {}, expected a number", where, io::shown(value));
      const auto number = value.get<double>();
      if (!std::isfinite(number) || std::abs(number) > static_cast<double>(std::numeric_limits<float>::max())) {
        fail("{}: got {}, expected a number that float32 holds", where, io::shown(value));
      }
      if (!contains(parameter.range, number)) {
        fail("{}: got {}, expected a number {}", where, io::shown(value), range_text(parameter.range));
      }
      return number;
    }
    case Parameter::Kind::kFlag:
      if (value.is_boolean()) return value.get<bool>() ? 1.0 : 0.0;
      if (value.is_number() && (value.get<double>() == 0.0 || value.get<double>() == 1.0)) return value.get<double>();
      fail("{}: got {}, expected true or false", where, io::shown(value));
    case Parameter::Kind::kChoice: {
      const auto name = value.is_boolean() ? std::string(value.get<bool>() ? "true" : "false")
                        : value.is_string() ? value.get<std::string>() : std::string();
      const auto found = std::ranges::find(parameter.choices, name);
      if (found != parameter.choices.end()) return static_cast<double>(found - parameter.choices.begin());
      const std::vector<std::string> names(parameter.choices.begin(), parameter.choices.end());
      fail("{}: got {}, expected {}{}", where, io::shown(value), quoted_list(names), did_you_mean(name, names));
    }
  }
  return 0.0;
}

// Names that could have been meant, for a filter that matches nothing: the parts of tensor names and pairs of them.
std::vector<std::string> possible_filters(const std::set<std::string>& tensors) {
  std::set<std::string> parts;
  for (const auto& tensor : tensors) {
    std::string before;
    std::size_t begin = 0;
    while (begin <= tensor.size()) {
      const auto end = std::min(tensor.find('.', begin), tensor.size());
      const auto part = tensor.substr(begin, end - begin);
      parts.insert(part);
      if (!before.empty()) parts.insert(before + "." + part);
      before = part;
      begin = end + 1;
    }
    if (parts.size() > 2000) break;
  }
  return {parts.begin(), parts.end()};
}

}  // namespace

ParameterLevel ParameterLevel::read(io::JsonObject& owner, const Method& method, FilterMatch match, bool allows_shared) {
  ParameterLevel level;
  level.match_ = match;
  const auto json = owner.any("parameters");
  if (!json || json->is_null()) return level;
  if (!json->is_object()) owner.fail_value("parameters", "expected an object of parameter: value");
  for (const auto& [name, value] : json->items()) {
    const auto pointer = "/" + io::escape_pointer(name);
    const auto where = owner.where("parameters", pointer);
    const auto* parameter = std::ranges::find(method.parameters, name, &Parameter::name).base();
    if (parameter == method.parameters.data() + method.parameters.size()) {
      std::vector<std::string> names;
      for (const auto& known : method.parameters) names.emplace_back(known.name);
      if (names.empty()) fail("{}: the method {} has no parameters; remove it", where, method.name);
      fail("{}: the method {} has no such parameter{}; it has {}", where, method.name, did_you_mean(name, names),
           quoted_list(names));
    }
    if (parameter->scope == Parameter::Scope::kShared && !allows_shared) {
      fail("{}: \"{}\" holds for all models together; put it into the \"parameters\" of the merge", where, name);
    }
    Setting setting{.parameter = parameter, .entries = {}};
    const auto read_entry = [&](const Json& given, std::string filter, const std::string& place) {
      Entry entry{.filter = std::move(filter), .where = place};
      if (given.is_array()) {
        if (given.empty()) fail("{}: is empty; give at least one value", place);
        for (std::size_t i = 0; i < given.size(); ++i) {
          entry.values.push_back(read_value(*parameter, given[i], fmt::format("{}/{}", place, i)));
        }
        entry.is_step = parameter->kind != Parameter::Kind::kNumber;
      } else {
        entry.values.push_back(read_value(*parameter, given, place));
      }
      setting.entries.push_back(std::move(entry));
    };
    const bool is_list_of_filters = value.is_array() && !value.empty() && value[0].is_object();
    if (!is_list_of_filters) {
      read_entry(value, "", where);
    } else {
      for (std::size_t i = 0; i < value.size(); ++i) {
        const auto place = owner.where("parameters", fmt::format("{}/{}", pointer, i));
        if (!value[i].is_object() || !value[i].contains("value")) {
          fail("{}: got {}, expected an object with \"value\" and perhaps \"filter\"", place, io::shown(value[i]));
        }
        for (const auto& [key, member] : value[i].items()) {
          if (key == "value" || key == "filter") continue;
          fail("{}/{}: unknown key{}", place, io::escape_pointer(key),
               did_you_mean(key, std::vector<std::string>{"value", "filter"}));
        }
        std::string filter;
        if (const auto given = value[i].find("filter"); given != value[i].end() && !given->is_null()) {
          if (!given->is_string()) fail("{}/filter: got {}, expected text of a tensor's name", place, io::shown(*given));
          filter = given->get<std::string>();
          if (filter == "*") filter.clear();
        }
        read_entry(value[i]["value"], std::move(filter), place);
      }
    }
    level.settings_.push_back(std::move(setting));
  }
  return level;
}

bool ParameterLevel::matches(const Entry& entry, std::string_view tensor) const {
  if (entry.filter.empty()) return true;
  return match_ == FilterMatch::kSubstring ? tensor.find(entry.filter) != std::string_view::npos
                                           : has_parts(tensor, entry.filter);
}

std::optional<double> ParameterLevel::find(const Parameter& parameter, std::string_view tensor, double position) const {
  for (const auto& setting : settings_) {
    if (setting.parameter != &parameter) continue;
    for (const auto& entry : setting.entries) {
      if (!matches(entry, tensor)) continue;
      const auto last = entry.values.size() - 1;
      const double x = position * static_cast<double>(last);
      const auto i = std::min(static_cast<std::size_t>(x), last);
      if (entry.is_step || i == last) return entry.values[i];
      const double fraction = x - static_cast<double>(i);
      return (1.0 - fraction) * entry.values[i] + fraction * entry.values[i + 1];
    }
  }
  return std::nullopt;
}

bool ParameterLevel::has_filters() const {
  return std::ranges::any_of(settings_, [](const Setting& setting) {
    return std::ranges::any_of(setting.entries, [](const Entry& entry) { return !entry.filter.empty(); });
  });
}

std::vector<std::string> ParameterLevel::check_filters(const std::set<std::string>& tensors) const {
  std::vector<std::string> warnings;
  for (const auto& setting : settings_) {
    for (const auto& entry : setting.entries) {
      if (entry.filter.empty()) continue;
      const std::string *whole = nullptr, *piece = nullptr;
      for (const auto& tensor : tensors) {
        if (!matches(entry, tensor)) continue;
        (has_parts(tensor, entry.filter) ? whole : piece) = &tensor;
      }
      if (whole == nullptr && piece == nullptr) {
        fail("{}/filter: got {}, which is in no tensor's name{}", entry.where, io::shown(Json(entry.filter)),
             did_you_mean(entry.filter, possible_filters(tensors)));
      }
      if (whole != nullptr && piece != nullptr) {
        warnings.push_back(fmt::format("{}/filter: \"{}\" is a part of {} but also hits {}; if that is not meant, "
                                       "write more of the name", entry.where, entry.filter, *whole, *piece));
      }
    }
  }
  return warnings;
}

double resolve(const Parameter& parameter, std::initializer_list<const ParameterLevel*> levels, std::string_view tensor,
               double position, std::string_view where) {
  for (const auto* level : levels) {
    if (level == nullptr) continue;
    if (const auto value = level->find(parameter, tensor, position)) return *value;
  }
  if (!parameter.fallback) {
    fail("{}: \"{}\" is missing for {}; give it in \"parameters\" ({})", where, parameter.name, tensor, parameter.summary);
  }
  return *parameter.fallback;
}

}  // namespace mergex::merging
