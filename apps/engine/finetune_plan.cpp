#include "finetune_plan.h"

#include <torch/torch.h>

#include "core/error.h"

namespace mergex::engine {
namespace fs = std::filesystem;
using io::Json;

ModelOptions ModelOptions::read(io::JsonObject options) {
  ModelOptions m;
  m.checkpoint = options.path("checkpoint");
  if (options.peek("config").is_string()) {
    const auto path = options.required_path("config");
    m.config = io::read_json(path);
    m.config_origin = path.string();
  } else if (options.has("config")) {
    m.config_origin = options.where("config");
    m.config = options.any("config");
  }
  if (m.checkpoint.has_value() == m.config.has_value()) {
    options.fail_value("checkpoint", m.config ? "but config is given too; keep one"
                                              : "give the folder of a checkpoint, or config for random weights");
  }
  if (const auto path = options.path("tokenizer")) {
    m.tokenizer = *path;
  } else if (m.checkpoint) {
    m.tokenizer = *m.checkpoint;
  } else {
    options.fail_value("tokenizer", "is missing: with config, name the folder that holds spiece.model");
  }
  const std::vector<std::string> heads{"classification", "language_model"};
  m.head = options.choice("head", heads, 0) == 0 ? backbones::Head::kClassification : backbones::Head::kLanguageModel;
  const std::vector<std::string> dtypes{"float32", "float64"};
  m.dtype = dtypes[options.choice("dtype", dtypes, 0)];
  m.dropout = options.maybe<double>("dropout", {.at_least = 0.0, .below = 1.0});
  m.embedding_std = options.maybe<double>("embedding_std", {.above = 0.0});
  if (m.embedding_std && m.checkpoint) {
    options.fail_value("embedding_std", "but the embeddings come from the checkpoint; remove it");
  }
  options.optional("new_head", m.new_head);
  options.finish();
  return m;
}

FinetunePlan FinetunePlan::read(const recipes::SweepRow& row) {
  FinetunePlan plan;
  plan.resolved = std::make_shared<Json>();
  io::JsonObject recipe(row.document, plan.resolved);
  plan.name = fs::path(row.document->file).stem().string();
  recipe.optional("name", plan.name);
  std::string description;  // for the reader of the recipe
  recipe.optional("description", description);
  recipe.optional("seed", plan.seed, {.at_least = 0});
  plan.paper = recipe.any("paper");
  plan.model = ModelOptions::read(recipe.required_object("model"));
  if (auto experts = recipe.object("experts")) plan.experts = routing::ExpertOptions::read(*experts);
  plan.task_origin = recipe.where("task");
  plan.task = tasks::read_task(recipe.required_object("task"));
  auto training = recipe.required_object("training");
  plan.loss = evaluation::TrainingLoss::read(training);
  plan.training = training::TrainingOptions::read(training, recipe.object_or_empty("evaluation"));
  recipe.finish();
  if (plan.training.precision != at::kFloat && plan.model.dtype != "float32") {
    fail("{}/precision: got a lower one than float32, but /model/dtype is {}; remove one of the two",
         plan.training.training_origin, plan.model.dtype);
  }
  if (plan.training.length_bucketing && plan.experts && plan.experts->depends_on_padding) {
    fail("{}/length_bucketing: got true, but with pool_padding \"include\" a sentence's result depends on how far it is "
         "padded; remove it, or set {}/pool_padding to \"exclude\"",
         plan.training.training_origin, plan.experts->origin);
  }
  const bool is_text = plan.task.is_sequence_to_sequence();
  if (is_text != (plan.model.head == backbones::Head::kLanguageModel)) {
    fail("{}: got \"{}\", which task \"{}\" cannot train; expected \"{}\"", recipe.where("model") + "/head",
         is_text ? "classification" : "language_model", plan.task.name, is_text ? "language_model" : "classification");
  }
  return plan;
}

}  // namespace mergex::engine
