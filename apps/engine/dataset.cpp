#include "dataset.h"

#include "core/error.h"
#include "core/log.h"
#include "finetune_run.h"
#include "io/checkpoint_folder.h"
#include "tasks/corrupt_spans.h"

namespace mergex::engine {

std::shared_ptr<const Dataset> DatasetCache::get(const FinetunePlan& plan) {
  const auto key = plan.resolved->at("task").dump() + plan.model.tokenizer.string();
  if (const auto found = datasets_.find(key); found != datasets_.end()) return found->second;
  // Where the folder itself is wrong, its own complaint says more than that of the tokenizer in it.
  if (plan.model.checkpoint) io::CheckpointFolder{*plan.model.checkpoint};
  auto dataset = std::make_shared<Dataset>();
  dataset->tokenizer = std::make_shared<text::T5Tokenizer>(text::T5Tokenizer::load(plan.model.tokenizer));
  dataset->data = plan.task.load({});
  const auto encode = [&](const tasks::Split& split) {
    if (plan.task.span_corruption) {
      const auto lengths = tasks::span_lengths(plan.task.max_length, *plan.task.span_corruption);
      if (lengths.spans > text::T5Tokenizer::kNumSentinels) {
        fail("{}/max_length: got {}, which has {} masked spans, but the tokenizer has {} sentinels; lower it, or raise "
             "mean_span_length",
             plan.task_origin, plan.task.max_length, lengths.spans, text::T5Tokenizer::kNumSentinels);
      }
      return tasks::encode_pieces(split, *dataset->tokenizer, lengths.text);
    }
    return tasks::encode(split, *dataset->tokenizer, plan.task.max_length);
  };
  log::debug("encoding {}", plan.task.name);
  if (dataset->data.validation.empty()) {
    fail("{}/files: names no validation file; add it, the best checkpoint is chosen on it", plan.task_origin);
  }
  const auto encode_some = [&](const tasks::Split& split) {
    auto encoded = encode(split);
    if (encoded.empty()) fail("{}: holds no text of two tokens or more; give another file", split.file.string());
    return encoded;
  };
  dataset->train = encode_some(dataset->data.train);
  for (const auto& split : dataset->data.validation) dataset->validation.push_back(encode_some(split));
  datasets_.emplace(key, dataset);
  return dataset;
}

}  // namespace mergex::engine
