#include "training/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace mergex::training {

Schedule Schedule::read(io::JsonObject options) {
  Schedule s;
  const std::vector<std::string> names{"linear", "cosine", "constant"};
  s.kind = static_cast<Kind>(options.choice("name", names, 0));
  const bool has_steps = options.optional("warmup_steps", s.warmup_steps, {.at_least = 0});
  if (options.optional("warmup_ratio", s.warmup_ratio, {.at_least = 0.0, .below = 1.0}) && s.warmup_ratio > 0.0 &&
      has_steps && s.warmup_steps > 0) {
    options.fail_value("warmup_ratio", "but warmup_steps is given too; keep one");
  }
  options.finish();
  return s;
}

std::int64_t Schedule::warmup(std::int64_t num_steps) const {
  if (warmup_steps > 0) return warmup_steps;
  return static_cast<std::int64_t>(std::ceil(warmup_ratio * static_cast<double>(num_steps)));
}

double Schedule::factor(std::int64_t step, std::int64_t num_steps) const {
  const auto rise = warmup(num_steps);
  if (step < rise) return static_cast<double>(step) / static_cast<double>(rise);
  if (kind == Kind::kConstant) return 1.0;
  const auto left = static_cast<double>(std::max<std::int64_t>(num_steps - step, 0)) /
                    static_cast<double>(std::max<std::int64_t>(num_steps - rise, 1));
  return kind == Kind::kLinear ? left : 0.5 * (1.0 - std::cos(std::numbers::pi * left));
}

}  // namespace mergex::training
