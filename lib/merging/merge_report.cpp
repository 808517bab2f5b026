#include "merging/merge_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace mergex::merging {
namespace {

using io::Json;

constexpr const char* kDistance = "distance_to_result";
constexpr const char* kTaskVector = "task_vector_norm";

/// Seven digits: what sums of float products are good for. Not finite: null.
Json rounded(double value) {
  if (!std::isfinite(value)) return nullptr;
  return std::strtod(fmt::format("{:.7g}", value).c_str(), nullptr);
}

Json cosine(double dot, double a_square, double b_square) {
  const double norms = std::sqrt(a_square) * std::sqrt(b_square);
  if (!(norms > 0.0)) return nullptr;
  return rounded(std::clamp(dot / norms, -1.0, 1.0));
}

void add_values(const Method& method, const Values& values, Json& object) {
  for (const auto& [name, value] : values.all()) {
    const auto parameter = std::ranges::find(method.parameters, name, &Parameter::name);
    const auto kind = parameter == method.parameters.end() ? Parameter::Kind::kNumber : parameter->kind;
    auto& shown = object[std::string(name)];
    if (kind == Parameter::Kind::kFlag) {
      shown = value != 0.0;
    } else if (kind == Parameter::Kind::kChoice) {
      shown = parameter->choices[static_cast<std::size_t>(value)];
    } else {
      shown = value;
    }
  }
}

}  // namespace

Json MergeReport::entry(const PlannedTensor& tensor, const MergedTensor& merged) const {
  const auto origin = [&](const PlannedTensor::Origin& from) {
    Json object{{"model", plan_.models[from.model].name}};
    if (from.tensor != tensor.name) object["tensor"] = from.tensor;
    return object;
  };
  Json entry{{"name", tensor.name}, {"shape", tensor.shape}, {"dtype", io::dtype_name(tensor.dtype)}};
  if (tensor.method == nullptr) {
    entry["copied_from"] = origin(*tensor.copied);
  } else {
    const auto& found = *merged.comparison;
    entry["method"] = tensor.method->name;
    Json shared = Json::object();
    add_values(*tensor.method, tensor.context.shared, shared);
    entry["parameters"] = std::move(shared);
    if (tensor.base) {
      entry["base"] = origin(*tensor.base);
      entry["base"]["cosine"] = cosine(found.base.dot, found.base.square, found.result_square);
    }
    entry["inputs"] = Json::array();
    for (std::size_t i = 0; i < tensor.inputs.size(); ++i) {
      auto input = origin(tensor.inputs[i]);
      add_values(*tensor.method, tensor.context.inputs[i].parameters, input);
      input[tensor.base ? kTaskVector : kDistance] = rounded(std::sqrt(found.inputs[i].distance));
      input["cosine"] = cosine(found.inputs[i].dot, found.inputs[i].square, found.result_square);
      entry["inputs"].push_back(std::move(input));
    }
    const auto num_elements = tensor.context.num_elements();
    if (tensor.base && tensor.inputs.size() > 1 && num_elements > 0) {
      entry["sign_conflicts"] = rounded(static_cast<double>(found.num_conflicts) / static_cast<double>(num_elements));
    }
    entry["not_finite"] = found.num_not_finite;
    if (!merged.findings.empty()) entry["findings"] = merged.findings;
  }
  if (!tensor.note.empty()) entry["note"] = tensor.note;
  return entry;
}

const std::string& MergeReport::add(const Json& entry, const PlannedTensor& tensor) {
  entries_.push_back(entry.dump(-1, ' ', false, Json::error_handler_t::replace));
  if (tensor.method == nullptr) return entries_.back();
  ++num_merged_;
  num_not_finite_ += entry.value("not_finite", std::int64_t{0});
  if (const auto share = entry.find("sign_conflicts"); share != entry.end() && share->is_number()) {
    num_elements_ += tensor.context.num_elements();
    num_conflicts_ += share->get<double>() * static_cast<double>(tensor.context.num_elements());
  }
  for (std::size_t i = 0; i < tensor.inputs.size(); ++i) {
    const auto& distance = entry.at("inputs").at(i).at(tensor.base ? kTaskVector : kDistance);
    if (distance.is_number()) distances_[tensor.inputs[i].model] += distance.get<double>() * distance.get<double>();
  }
  return entries_.back();
}

std::string MergeReport::text() const {
  const bool has_base = std::ranges::any_of(plan_.tensors, [](const auto& tensor) { return tensor.base.has_value(); });
  Json totals{{"tensors", entries_.size()}, {"merged", num_merged_}, {"not_finite", num_not_finite_}};
  if (num_elements_ > 0) totals["sign_conflicts"] = rounded(num_conflicts_ / static_cast<double>(num_elements_));
  totals["inputs"] = Json::array();
  for (std::size_t i = 0; i < plan_.models.size(); ++i) {
    if (distances_[i] > 0.0) {
      totals["inputs"].push_back(
          {{"model", plan_.models[i].name}, {has_base ? kTaskVector : kDistance, rounded(std::sqrt(distances_[i]))}});
    }
  }
  return fmt::format("{{\n\"totals\": {},\n\"warnings\": {},\n\"tensors\": [\n{}\n]\n}}\n", totals.dump(),
                     Json(plan_.warnings).dump(-1, ' ', false, Json::error_handler_t::replace),
                     fmt::join(entries_, ",\n"));
}

}  // namespace mergex::merging
