#include <array>

#include "training/optimizer.h"

namespace mergex::training {
namespace {

constexpr std::array kOptimizers{&kAdamW, &kAdafactor};

}  // namespace

std::span<const OptimizerKind* const> optimizer_registry() { return kOptimizers; }

OptimizerOptions OptimizerOptions::read(io::JsonObject options) {
  std::vector<std::string> names;
  for (const auto* kind : kOptimizers) names.emplace_back(kind->name);
  const auto& kind = *kOptimizers[options.choice("name", names, 0)];
  OptimizerOptions o;
  o.name = kind.name;
  const io::Range rates{.above = 0.0, .at_most = 10.0};
  if (kind.has_own_rate) {
    o.learning_rate = options.maybe<double>("learning_rate", rates);
  } else {
    o.learning_rate = options.required<double>("learning_rate", rates);
  }
  options.optional("weight_decay", o.weight_decay, {.at_least = 0.0});
  o.make = kind.configure(options, o.learning_rate);
  options.finish();
  return o;
}

}  // namespace mergex::training
