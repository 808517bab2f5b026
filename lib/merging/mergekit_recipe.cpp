#include "merging/mergekit_recipe.h"

#include "core/error.h"
#include "core/suggest.h"

namespace mergex::merging {

io::JsonDocument recipe_from_mergekit(const io::JsonDocument& yaml) {
  const auto& given = yaml.value;
  if (!given.is_object()) fail("{}: got {}, expected a mapping with \"merge_method\"", yaml.file, io::shown(given));
  io::JsonDocument recipe{.value = io::Json::object(), .file = yaml.file, .origins = {}};
  auto merge = io::Json::object();
  bool has_method = false;
  for (const auto& [key, value] : given.items()) {
    if (key == "name") {
      recipe.value["name"] = value;
    } else if (key == "merge_method") {
      merge["method"] = value;
      has_method = true;
    } else {
      merge[key] = value;
    }
  }
  if (!has_method) {
    std::vector<std::string> keys;
    for (const auto& [key, value] : given.items()) keys.push_back(key);
    const auto near = nearest("merge_method", keys);
    fail("{}: \"merge_method\" is missing{}", yaml.file, near.empty() ? "; name one (mergex merge --list)" : fmt::format("; is \"{}\" meant to be it?", near));
  }
  if (!merge.contains("filters")) merge["filters"] = "substring";
  if (!merge.contains("padding_rows")) merge["padding_rows"] = "drop";
  recipe.value["merge"] = std::move(merge);
  for (const auto& [pointer, origin] : yaml.origins) {
    const auto renamed = pointer == "/merge_method" ? std::string("/method") : pointer;
    recipe.origins.emplace(pointer == "/name" ? pointer : "/merge" + renamed, origin);
  }
  return recipe;
}

}  // namespace mergex::merging
