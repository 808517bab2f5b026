#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "backbones/backbone.h"
#include "evaluation/objective.h"
#include "io/json_object.h"
#include "recipes/recipe.h"
#include "routing/method.h"
#include "tasks/registry.h"
#include "training/trainer.h"

namespace mergex::engine {

/// The `model` section.
struct ModelOptions {
  std::optional<std::filesystem::path> checkpoint;
  std::optional<io::Json> config;   ///< random weights of this config instead
  std::string config_origin;
  std::filesystem::path tokenizer;  ///< folder or file
  backbones::Head head = backbones::Head::kClassification;
  std::string dtype = "float32";
  std::optional<double> dropout, embedding_std;
  bool new_head = false;  ///< draw a new head even if the checkpoint has one

  static ModelOptions read(io::JsonObject options);
};

/// All sections of a recipe, checked as far as they can be without opening data or weights.
struct FinetunePlan {
  std::string name;
  std::int64_t seed = 42;
  std::optional<io::Json> paper;
  ModelOptions model;
  std::optional<routing::ExpertOptions> experts;
  tasks::Task task;
  std::string task_origin;  ///< where its section stands, for messages
  evaluation::TrainingLoss loss;
  training::TrainingOptions training;
  std::shared_ptr<io::Json> resolved;  ///< the recipe as it will run, with defaults and absolute paths

  static FinetunePlan read(const recipes::SweepRow& row);
};

}  // namespace mergex::engine
