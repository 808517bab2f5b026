#include "tasks/registry.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/suggest.h"
#include "tasks/glue.h"
#include "tasks/span_corruption.h"
#include "tasks/table_task.h"

namespace mergex::tasks {
namespace {

constexpr std::array kTasks{&kGlueCola, &kGlueSst2, &kGlueMrpc, &kGlueStsb,       &kGlueQqp,    &kGlueMnli,
                            &kGlueQnli, &kGlueRte,  &kGlueWnli, &kClassification, &kRegression, &kSpanCorruption};

}  // namespace

std::span<const TaskEntry* const> registry() { return kTasks; }

Task read_task(io::JsonObject section) {
  const auto name = section.required<std::string>("name");
  const auto found = std::ranges::find(kTasks, name, &TaskEntry::name);
  if (found == kTasks.end()) {
    std::vector<std::string> names;
    for (const auto* entry : kTasks) names.emplace_back(entry->name);
    section.fail_value("name", fmt::format("no such task{} (mergex finetune --list)", did_you_mean(name, names)));
  }
  auto task = (*found)->configure(section);
  section.optional("cache", task.cache);
  task.name = name;
  section.finish();
  return task;
}

}  // namespace mergex::tasks
