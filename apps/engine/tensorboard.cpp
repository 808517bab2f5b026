#include "tensorboard.h"

#include <cmath>
#include <memory>
#include <vector>

#include "io/tensorboard_events.h"

namespace mergex::engine {

std::function<void(const io::Json& line)> tensorboard_observer(const std::filesystem::path& folder) {
  const auto events = std::make_shared<std::unique_ptr<io::TensorboardEvents>>();
  return [events, folder](const io::Json& line) {
    std::vector<std::pair<std::string, double>> scalars;
    const auto add = [&](const std::string& group, const io::Json& values) {
      for (const auto& [name, value] : values.items()) {
        // Whole numbers are counts (step, n); null is an undefined metric, as is the norm of a skipped step.
        if (!value.is_number_float() || name == "epoch" || !std::isfinite(value.get<double>())) continue;
        scalars.emplace_back(group + "/" + name, value.get<double>());
      }
    };
    if (const auto splits = line.find("evaluation"); splits != line.end()) {
      for (const auto& [split, values] : splits->items()) add(split, values);
    } else {
      add("train", line);
    }
    const auto step = line.at("step").get<std::int64_t>();
    // Lines come at the same steps however often a run is interrupted, so the first one here is the first to replace.
    if (!*events) *events = std::make_unique<io::TensorboardEvents>(folder, step);
    (*events)->add(step, scalars);
  };
}

}  // namespace mergex::engine
