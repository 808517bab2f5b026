#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dataset.h"
#include "evaluation/evaluate.h"
#include "finetune_plan.h"
#include "memory_estimate.h"
#include "model_files.h"

namespace mergex::engine {

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
