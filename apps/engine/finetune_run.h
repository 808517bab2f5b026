#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dataset.h"
#include "evaluation/evaluate.h"
#include "io/json_object.h"
#include "memory_estimate.h"
#include "model_files.h"
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

struct Machine {
  at::Device device = at::kCPU;
  std::int64_t threads = 1;
  std::string describe() const;
  /// Bytes that a run may take here; none where the machine does not say.
  std::optional<std::int64_t> available_memory() const;
};

/// A folder and its parents. @throws UserError when it cannot be made
void make_folder(const std::filesystem::path& folder);

/// One fine-tuning run in a folder of its own.
class FinetuneRun {
 public:
  /// Opens data and weights, checks that they fit each other, builds the model. Writes nothing.
  /// @param counts_only  no weights are read and none are allocated: for the plan of a dry run
  FinetuneRun(FinetunePlan plan, std::shared_ptr<const Dataset> dataset, const Machine& machine, bool counts_only);

  /// Lines of the plan: model, parameters, data, steps.
  std::string describe() const;
  io::Json plan_json() const;

  /// Trains (or goes on from the folder's newest checkpoint), scores the best checkpoint, writes the results.
  /// @return what the run says of itself: the content of results.json
  io::Json run(const std::filesystem::path& folder);

  /// What decides how much memory the run needs.
  MemoryFactors memory_factors() const;

  /// Data, weights and tokenizer that the run reads.
  std::vector<std::filesystem::path> input_files() const;

 private:
  /// The recipe's parameter groups and what falls into each.
  io::Json groups_json() const;
  /// Whether a run that is in the folder can go on here.
  void check_machine(const std::filesystem::path& folder) const;
  double selected_value(const evaluation::SplitResult& split) const;
  evaluation::Batch text_batch(std::span<const std::size_t> examples, const std::vector<tasks::Encoded>& from,
                               const std::string& stream) const;
  std::vector<evaluation::SplitResult> evaluate();
  void write_predictions(const std::filesystem::path& folder, const std::vector<evaluation::SplitResult>& splits) const;
  io::Json results(const training::TrainingResult& trained, const std::vector<evaluation::SplitResult>& splits) const;

  FinetunePlan plan_;
  std::shared_ptr<const Dataset> dataset_;
  Machine machine_;
  Model model_;
  evaluation::Objective objective_;
  std::string select_by_;
  bool higher_is_better_ = true;
  std::vector<std::filesystem::path> weight_files_;
};

}  // namespace mergex::engine
