#include "merging/chat_template.h"

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "io/atomic_file.h"
#include "io/json.h"

namespace mergex::merging {
namespace fs = std::filesystem;
namespace {

constexpr const char* kFile = "chat_template.jinja";
constexpr const char* kTokenizerConfig = "tokenizer_config.json";
constexpr const char* kKey = "chat_template";

// transformers prefers the file to the key of the tokenizer's config.
std::optional<std::string> template_of(const fs::path& folder) {
  std::error_code ignored;
  if (fs::is_regular_file(folder / kFile, ignored)) return io::read_file(folder / kFile);
  if (!fs::is_regular_file(folder / kTokenizerConfig, ignored)) return std::nullopt;
  const auto config = io::read_json(folder / kTokenizerConfig);
  if (!config.is_object() || !config.contains(kKey) || !config[kKey].is_string()) return std::nullopt;
  return config[kKey].get<std::string>();
}

std::string chosen(const MergePlan& plan, const std::string& choice, const std::string& where) {
  if (choice == "auto") {
    std::vector<std::pair<std::string, int>> counts;  // in the order of the models
    for (const auto& model : plan.models) {
      const auto found = template_of(model.folder->path());
      if (!found) continue;
      const auto known = std::ranges::find(counts, *found, &std::pair<std::string, int>::first);
      if (known == counts.end()) {
        counts.emplace_back(*found, 1);
      } else {
        ++known->second;
      }
    }
    if (counts.empty()) fail("{}: got \"auto\", but no model has a chat template; remove the key", where);
    return std::ranges::max_element(counts, {}, &std::pair<std::string, int>::second)->first;
  }
  if (choice.find('{') != std::string::npos) return choice;
  const auto model = std::ranges::find(plan.models, choice, &Model::name);
  if (model == plan.models.end()) {
    fail("{}: got {}, expected \"auto\", a model of this merge, or a template (Jinja, with \"{{\")", where,
         io::shown(io::Json(choice)));
  }
  const auto found = template_of(model->folder->path());
  if (!found) fail("{}: {} has no chat template", where, choice);
  return *found;
}

}  // namespace

void plan_chat_template(MergePlan& plan, const std::string& choice, const std::string& where) {
  auto text = chosen(plan, choice, where);
  std::erase_if(plan.copied_files, [](const fs::path& file) { return file == kFile; });
  std::erase_if(plan.written_files, [](const auto& file) { return file.first == kFile; });
  plan.written_files.emplace_back(kFile, std::move(text));
  // A second template in the tokenizer's config would be another answer to the same question.
  const auto copied = std::ranges::find(plan.copied_files, fs::path(kTokenizerConfig));
  auto written = std::ranges::find(plan.written_files, kTokenizerConfig, &std::pair<std::string, std::string>::first);
  if (copied == plan.copied_files.end() && written == plan.written_files.end()) return;
  auto config = written != plan.written_files.end() ? io::parse_json(written->second, kTokenizerConfig)
                                                    : io::read_json(plan.donor / kTokenizerConfig);
  if (!config.is_object() || config.erase(kKey) == 0) return;
  if (written == plan.written_files.end()) {
    plan.copied_files.erase(copied);
    plan.written_files.emplace_back(kTokenizerConfig, config.dump(2) + "\n");
  } else {
    written->second = config.dump(2) + "\n";
  }
}

}  // namespace mergex::merging
