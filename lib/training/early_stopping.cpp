#include "training/early_stopping.h"

namespace mergex::training {

std::optional<EarlyStopping> EarlyStopping::read(io::JsonObject& evaluation) {
  auto options = evaluation.object("early_stopping");
  if (!options) return std::nullopt;
  EarlyStopping result;
  result.patience_ = options->required<std::int64_t>("patience", {.at_least = 1, .at_most = 1e9});
  options->optional("min_delta", result.min_delta_, {.at_least = 0.0});
  options->finish();
  return result;
}

void EarlyStopping::observe(double value, bool higher_is_better) {
  const auto gain = !best_ ? min_delta_ + 1.0 : higher_is_better ? value - *best_ : *best_ - value;
  if (gain > min_delta_) {
    best_ = value;
    waited_ = 0;
  } else {
    ++waited_;
  }
}

void EarlyStopping::save(TrainingState& state) const {
  state.values["early_stopping"] = {{"best", best_ ? io::Json(*best_) : io::Json()}, {"waited", waited_}};
}

void EarlyStopping::restore(const TrainingState& state) {
  const auto& v = state.values.at("early_stopping");
  best_ = v.at("best").is_null() ? std::nullopt : std::optional(v.at("best").get<double>());
  waited_ = v.at("waited");
}

}  // namespace mergex::training
