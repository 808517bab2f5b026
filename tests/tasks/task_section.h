#pragma once

#include <fmt/format.h>

#include <memory>
#include <string>

#include "io/json_object.h"
#include "tasks/registry.h"

namespace mergex::test {

/// The task of a recipe that has nothing but a `task` section, as if it lay at `file`.
inline tasks::Task task_of(const std::string& section, const std::string& file = "r.json",
                           std::shared_ptr<io::Json> resolved = nullptr) {
  auto document = std::make_shared<io::JsonDocument>();
  document->value = io::parse_json("{\"task\": " + section + "}", file);
  document->file = file;
  return tasks::read_task(io::JsonObject(document, std::move(resolved)).required_object("task"));
}

}  // namespace mergex::test
