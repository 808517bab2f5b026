#include "merging/model_card.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <regex>
#include <set>
#include <vector>

namespace mergex::merging {
namespace {

/// The model's name on the Hugging Face hub, as the hub's cache names folders (models--owner--name/snapshots/...).
/// Other folders may hold anything, whatever they are called.
std::optional<std::string> hub_name(const std::filesystem::path& folder) {
  static const std::regex cached("models--([A-Za-z0-9][A-Za-z0-9._-]*?)--([A-Za-z0-9][A-Za-z0-9._-]*)");
  for (const auto& part : folder) {
    const auto name = part.string();
    if (std::smatch match; std::regex_match(name, match, cached)) return match[1].str() + "/" + match[2].str();
  }
  return std::nullopt;
}

std::string plural(std::size_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

}  // namespace

std::string model_card(const MergePlan& plan) {
  std::string card = "---\ntags:\n- merge\n- mergex\n";
  std::vector<std::string> bases;
  for (const auto& model : plan.models) {
    if (const auto name = hub_name(model.folder->path()); name && std::ranges::find(bases, *name) == bases.end())
      bases.push_back(*name);
  }
  if (!bases.empty()) card += fmt::format("base_model:\n- {}\n", fmt::join(bases, "\n- "));
  const auto name = plan.resolved.is_object() ? plan.resolved.value("name", std::string()) : "";
  card += fmt::format("---\n\n# {}\n\n", name.empty() ? "Merged model" : name);

  std::set<std::string_view> names;
  std::vector<std::string> methods;
  std::size_t num_merged = 0;
  for (const auto& tensor : plan.tensors) {
    if (tensor.method == nullptr) continue;
    ++num_merged;
    if (names.insert(tensor.method->name).second) {
      methods.push_back(
          fmt::format("`{}` ({}; {})", tensor.method->name, tensor.method->summary, tensor.method->paper));
    }
  }
  card += fmt::format("Merged by mergex from {}:\n\n", plural(plan.models.size(), "checkpoint"));
  for (const auto& model : plan.models) card += fmt::format("- `{}`\n", model.name);
  card +=
      fmt::format("\n{} computed{}, {} copied unchanged. `merge_report.json` says what became of each.\n",
                  plural(num_merged, "tensor"), methods.empty() ? "" : fmt::format(" by {}", fmt::join(methods, ", ")),
                  plan.tensors.size() - num_merged);
  card += fmt::format("\nThe recipe, with everything filled in:\n\n```json\n{}\n```\n",
                      plan.resolved.dump(2, ' ', false, io::Json::error_handler_t::replace));
  return card;
}

}  // namespace mergex::merging
