#include "merge_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "core/bytes.h"
#include "core/error.h"
#include "core/suggest.h"
#include "merging/names.h"

namespace mergex {
using io::Json;
using merging::MergePlan;
using merging::Parameter;
using merging::PlannedTensor;

namespace {

std::string value_text(const Parameter& parameter, double value) {
  if (parameter.kind == Parameter::Kind::kFlag) return value != 0.0 ? "true" : "false";
  if (parameter.kind == Parameter::Kind::kChoice) return std::string(parameter.choices[static_cast<std::size_t>(value)]);
  return fmt::format("{}", value);
}

std::string values_text(const merging::Method& method, const merging::Values& values) {
  std::string text;
  for (const auto& [name, value] : values.all()) {
    const auto parameter = std::ranges::find(method.parameters, name, &Parameter::name);
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, value_text(*parameter, value));
  }
  return text;
}

const std::string& model_name(const MergePlan& plan, const PlannedTensor::Origin& origin) {
  return plan.models[origin.model].name;
}

// "a (weight 0.2), b (weight 0.5) | lambda 1"
std::string recipe_text(const MergePlan& plan, const PlannedTensor& tensor) {
  if (tensor.method == nullptr) return "copied from " + model_name(plan, *tensor.copied);
  std::string text(tensor.method->name);
  const auto shared = values_text(*tensor.method, tensor.context.shared);
  if (!shared.empty()) text += " (" + shared + ")";
  text += ": ";
  for (std::size_t i = 0; i < tensor.inputs.size(); ++i) {
    const auto own = values_text(*tensor.method, tensor.context.inputs[i].parameters);
    text += fmt::format("{}{}{}", i == 0 ? "" : ", ", model_name(plan, tensor.inputs[i]), own.empty() ? "" : " (" + own + ")");
  }
  if (tensor.base) text += "; base " + model_name(plan, *tensor.base);
  return text;
}

struct Group {
  std::string name, how, note;
  io::DType dtype;
  std::uint64_t count = 0, bytes = 0;
};

// Tensors that differ in the layer alone are one line.
std::vector<Group> groups_of(const MergePlan& plan) {
  std::vector<Group> groups;
  std::unordered_map<std::string, std::size_t> known;
  for (const auto& tensor : plan.tensors) {
    auto name = tensor.name;
    if (const auto layer = merging::layer_of(name)) name = layer->stack + (layer->stack.empty() ? "*." : ".*.") + layer->rest;
    auto how = recipe_text(plan, tensor);
    const auto [found, is_new] = known.emplace(fmt::format("{}|{}|{}|{}", name, how, tensor.note, io::dtype_name(tensor.dtype)), groups.size());
    if (is_new) groups.push_back({name, std::move(how), tensor.note, tensor.dtype});
    auto& group = groups[found->second];
    ++group.count;
    group.bytes += tensor.num_bytes();
  }
  return groups;
}

}  // namespace

std::string method_list_text() {
  std::string text = "merge methods (/merge/method; merge_method in mergekit's YAML)\n";
  for (const auto* method : merging::methods()) {
    text += fmt::format("  {:<16} {}\n  {:<16}   {}\n", method->name, method->summary, "", method->paper);
    for (const auto& p : method->parameters) {
      std::string kind = p.kind == Parameter::Kind::kFlag ? "true or false" : p.kind == Parameter::Kind::kNumber ? "number" : "";
      if (p.kind == Parameter::Kind::kChoice) kind = fmt::format("{}", fmt::join(p.choices, ", "));
      text += fmt::format("  {:<16}   {} ({}{}; {}): {}\n", "", p.name, kind,
                          p.scope == Parameter::Scope::kInput ? ", per model" : "",
                          p.fallback ? "default " + value_text(p, *p.fallback) : "required", p.summary);
    }
  }
  return text;
}

Json method_list_json() {
  auto list = Json::array();
  for (const auto* method : merging::methods()) {
    auto parameters = Json::array();
    for (const auto& p : method->parameters) {
      parameters.push_back({{"name", p.name}, {"per_model", p.scope == Parameter::Scope::kInput}, {"summary", p.summary},
                            {"default", p.fallback ? Json(value_text(p, *p.fallback)) : Json()}});
    }
    list.push_back({{"name", method->name}, {"summary", method->summary}, {"paper", method->paper}, {"parameters", parameters}});
  }
  return list;
}

std::string plan_text(const MergePlan& plan) {
  std::string text;
  std::uint64_t bytes = 0, copied = 0;
  for (const auto& group : groups_of(plan)) {
    text += fmt::format("{:>5} x {:<52} {:>9} {:<5} {}{}\n", group.count, group.name, bytes_text(group.bytes),
                        io::dtype_name(group.dtype), group.how, group.note.empty() ? "" : " [" + group.note + "]");
  }
  for (const auto& tensor : plan.tensors) {
    bytes += tensor.num_bytes();
    if (tensor.method == nullptr) copied += tensor.num_bytes();
  }
  text += fmt::format("writes {} tensors, {} ({} copied as bytes)\n", plan.tensors.size(), bytes_text(bytes), bytes_text(copied));
  std::string files;
  for (const auto& [name, content] : plan.written_files) files += (files.empty() ? "" : ", ") + name;
  text += fmt::format("beside them {}", files);
  if (!plan.copied_files.empty()) {
    std::vector<std::string> names;
    for (const auto& file : plan.copied_files) names.push_back(file.string());
    text += fmt::format("; copied from {}: {}", plan.donor.string(), fmt::join(names, ", "));
  }
  return text + "\n";
}

Json plan_json(const MergePlan& plan) {
  auto tensors = Json::array();
  for (const auto& tensor : plan.tensors) {
    auto inputs = Json::array();
    for (std::size_t i = 0; i < tensor.inputs.size(); ++i) {
      auto entry = Json{{"model", model_name(plan, tensor.inputs[i])}, {"tensor", tensor.inputs[i].tensor}};
      for (const auto& [name, value] : tensor.context.inputs[i].parameters.all()) entry["parameters"][std::string(name)] = value;
      inputs.push_back(std::move(entry));
    }
    auto entry = Json{{"name", tensor.name}, {"dtype", io::dtype_name(tensor.dtype)}, {"shape", tensor.shape},
                      {"bytes", tensor.num_bytes()}, {"method", tensor.method == nullptr ? Json() : Json(tensor.method->name)}};
    if (tensor.copied) entry["copied"] = {{"model", model_name(plan, *tensor.copied)}, {"tensor", tensor.copied->tensor}};
    if (tensor.base) entry["base"] = {{"model", model_name(plan, *tensor.base)}, {"tensor", tensor.base->tensor}};
    for (const auto& [name, value] : tensor.context.shared.all()) entry["parameters"][std::string(name)] = value;
    entry["inputs"] = std::move(inputs);
    if (!tensor.note.empty()) entry["note"] = tensor.note;
    tensors.push_back(std::move(entry));
  }
  return {{"recipe", plan.resolved}, {"tensors", std::move(tensors)}, {"warnings", plan.warnings}};
}

std::string explain_text(const MergePlan& plan, const std::string& name) {
  const auto found = std::ranges::find(plan.tensors, name, &PlannedTensor::name);
  if (found == plan.tensors.end()) {
    std::vector<std::string> names;
    for (const auto& tensor : plan.tensors) names.push_back(tensor.name);
    fail("--explain: got \"{}\", which this merge does not write{}", name, did_you_mean(name, names));
  }
  const auto& tensor = *found;
  std::string text = fmt::format("{}  {} {}, {}\n", tensor.name, io::dtype_name(tensor.dtype), io::shape_text(tensor.shape),
                                 bytes_text(tensor.num_bytes()));
  if (!tensor.note.empty()) text += fmt::format("  {}\n", tensor.note);
  const auto origin_text = [&](const PlannedTensor::Origin& origin) {
    const auto& model = plan.models[origin.model];
    const auto* stored = model.folder->find(origin.tensor);
    return fmt::format("\"{}\" {} of {} ({})", origin.tensor, stored == nullptr ? "" : io::dtype_name(stored->dtype), model.name,
                       model.folder->file_of(origin.tensor));
  };
  if (tensor.method == nullptr) return text + fmt::format("  the bytes of {}\n", origin_text(*tensor.copied));
  text += fmt::format("  {}: {}\n", tensor.method->name, tensor.method->summary);
  const auto shared = values_text(*tensor.method, tensor.context.shared);
  if (!shared.empty()) text += fmt::format("  {}\n", shared);
  if (tensor.base) text += fmt::format("  base   {}\n", origin_text(*tensor.base));
  for (std::size_t i = 0; i < tensor.inputs.size(); ++i) {
    text += fmt::format("  input  {}  {}\n", origin_text(tensor.inputs[i]), values_text(*tensor.method, tensor.context.inputs[i].parameters));
  }
  return text + fmt::format("  computed in {}, rounded once\n", tensor.wide ? "float64" : "float32 or wider");
}

}  // namespace mergex
