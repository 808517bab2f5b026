#include "merging/adapter_section.h"

#include "merging/parameters.h"

namespace mergex::merging {
namespace {

// The parameters of a mode are numbers for whole adapters: a gradient or a filter has nothing to go by.
Values values_of(const Method& method, Parameter::Scope scope, std::initializer_list<const ParameterLevel*> levels,
                 const std::string& where) {
  Values values;
  for (const auto& parameter : method.parameters) {
    if (parameter.scope == scope) values.set(parameter.name, resolve(parameter, levels, "this adapter", 0.0, where));
  }
  return values;
}

}  // namespace

bool merges_adapters(const io::JsonObject& root) {
  const auto& merge = root.peek("merge");
  return merge.is_object() && merge.contains("adapters");
}

AdapterSection read_adapter_section(io::JsonObject& root, std::uint64_t seed) {
  auto merge = root.required_object("merge");
  AdapterSection section;
  auto& options = section.options;
  options.seed = seed;
  options.mode = find_adapter_mode(merge.required<std::string>("method"), merge.where("method"));
  options.dialect = static_cast<Dialect>(merge.choice("dialect", kDialectNames, 0));
  merge.optional("rank", options.rank, {.at_least = 0, .at_most = 65536});
  if (const auto base = merge.path("base_model")) options.base = std::make_shared<io::CheckpointFolder>(*base);
  const Method parameters_alone{.name = options.mode.name, .summary = {}, .paper = {}, .parameters = options.mode.parameters};
  const auto shared = ParameterLevel::read(merge, parameters_alone, FilterMatch::kParts, true);
  options.shared = values_of(parameters_alone, Parameter::Scope::kShared, {&shared}, merge.where());
  std::vector<ParameterLevel> levels;
  for (auto& entry : merge.objects("adapters")) {
    const auto folder = entry.required_path("adapter");
    levels.push_back(ParameterLevel::read(entry, parameters_alone, FilterMatch::kParts, false));
    section.inputs.push_back({.name = entry.peek("adapter").get<std::string>(),
                              .adapter = std::make_shared<io::AdapterFolder>(folder),
                              .parameters = values_of(parameters_alone, Parameter::Scope::kInput, {&levels.back(), &shared}, entry.where())});
    entry.finish();
  }
  if (section.inputs.empty()) merge.fail_value("adapters", "expected at least one adapter");
  merge.finish();
  for (const auto& level : levels) level.check_filters({});
  shared.check_filters({});
  return section;
}

}  // namespace mergex::merging
