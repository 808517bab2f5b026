#include <algorithm>

#include "core/error.h"
#include "training/precision.h"
#include "training/trainer.h"
#include "training/weight_average.h"

namespace mergex::training {

TrainingOptions TrainingOptions::read(io::JsonObject training, io::JsonObject evaluation) {
  TrainingOptions o;
  o.training_origin = training.where();
  o.evaluation_origin = evaluation.where();
  const io::Range counts{.at_least = 1, .at_most = 1e9};
  const bool has_steps = training.has("max_steps"), has_epochs = training.has("epochs");
  if (has_steps == has_epochs) {
    training.fail_value("max_steps", has_steps ? "but epochs is given too; keep one"
                                               : "epochs or max_steps is missing; add one");
  }
  if (has_steps) o.max_steps = training.required<std::int64_t>("max_steps", {.at_least = 0, .at_most = 1e9});
  if (has_epochs) o.epochs = training.required<std::int64_t>("epochs", {.at_least = 1, .at_most = 1e6});
  training.optional("batch_size", o.batch_size, counts);
  training.optional("gradient_accumulation", o.gradient_accumulation, counts);
  o.optimizer = OptimizerOptions::read(training.required_object("optimizer"));
  o.parameter_groups = read_parameter_groups(training, o.optimizer);
  o.schedule = Schedule::read(training.object_or_empty("schedule"));
  if (!o.optimizer.learning_rate && (o.schedule.kind != Schedule::Kind::kConstant || o.schedule.warmup(1000) > 0)) {
    fail("{}: {} chooses its own learning rate (relative_step); expected {{\"name\": \"constant\"}} without "
         "warm-up",
         training.where("schedule"), o.optimizer.name);
  }
  training.optional("max_grad_norm", o.max_grad_norm, {.at_least = 0.0});
  o.precision = read_precision(training);
  training.optional("activation_checkpointing", o.activation_checkpointing);
  training.optional("length_bucketing", o.length_bucketing);
  o.average_decay = read_average_decay(training);
  training.optional("log_every", o.log_every, counts);
  training.optional("save_every", o.save_every, {.at_least = 0, .at_most = 1e9});
  training.optional("keep_checkpoints", o.keep_checkpoints, counts);
  training.optional("tensorboard", o.tensorboard);
  training.finish();

  const auto& every = evaluation.peek("every");
  if (every.is_number()) {
    o.evaluate_every = evaluation.required<std::int64_t>("every", counts);
  } else {
    evaluation.choice("every", std::vector<std::string>{"epoch"}, 0);
  }
  evaluation.optional("batch_size", o.evaluation_batch_size, counts);
  evaluation.optional("select_best_by", o.select_best_by);
  o.early_stopping = EarlyStopping::read(evaluation);
  evaluation.finish();
  return o;
}

std::int64_t TrainingOptions::steps_per_epoch(std::int64_t num_examples) const {
  const auto per_step = batch_size * gradient_accumulation;
  return (num_examples + per_step - 1) / per_step;
}

std::int64_t TrainingOptions::num_steps(std::int64_t num_examples) const {
  return epochs > 0 ? epochs * steps_per_epoch(num_examples) : max_steps;
}

}  // namespace mergex::training
