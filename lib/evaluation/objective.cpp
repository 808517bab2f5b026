#include "evaluation/objective.h"

#include <torch/torch.h>

#include <algorithm>

#include "core/error.h"

namespace mergex::evaluation {
namespace {

struct Padded {
  Tensor ids, mask;
};

/// Rows padded on the right to the longest, and to `min_length` at least.
template <class Rows>
Padded pad_right(const Rows& rows, std::int64_t pad_id, std::int64_t min_length = 0) {
  auto longest = static_cast<std::size_t>(std::max<std::int64_t>(min_length, 1));
  for (const auto& row : rows) longest = std::max(longest, row.size());
  const auto batch = static_cast<std::int64_t>(rows.size());
  auto ids = torch::full({batch, static_cast<std::int64_t>(longest)}, pad_id, at::kLong);
  auto mask = torch::zeros_like(ids);
  auto* id = ids.template mutable_data_ptr<std::int64_t>();
  auto* real = mask.template mutable_data_ptr<std::int64_t>();
  for (const auto& row : rows) {
    std::ranges::copy(row, id);
    std::fill_n(real, row.size(), 1);
    id += longest;
    real += longest;
  }
  return {ids, mask};
}

Tensor widened(const Tensor& t) { return t.to(at::promote_types(t.scalar_type(), at::kFloat)); }

}  // namespace

Batch Objective::batch(std::span<const tasks::Encoded* const> examples) const {
  std::vector<std::span<const std::int32_t>> rows;
  std::vector<double> gold;
  std::vector<std::uint8_t> labelled;
  for (const auto* example : examples) {
    rows.emplace_back(example->ids);
    labelled.push_back(example->label ? 1 : 0);
    if (example->label) gold.push_back(*example->label);
  }
  const auto padded = pad_right(rows, pad_id_, min_length_);
  Batch result;
  result.inputs.input_ids_BT = padded.ids.to(device_);
  result.inputs.attention_mask_BT = padded.mask.to(device_);
  result.gold_B = torch::tensor(gold, at::kDouble)
                      .to(kind_ == tasks::Kind::kClassification ? at::kLong : at::kDouble)
                      .to(device_);
  if (gold.size() < examples.size()) {
    result.labelled_B = torch::tensor(std::vector<std::int64_t>(labelled.begin(), labelled.end())).to(at::kBool).to(device_);
  }
  result.num_units = static_cast<double>(gold.size());
  return result;
}

Batch Objective::batch(const std::vector<std::vector<std::int32_t>>& inputs,
                       const std::vector<std::vector<std::int32_t>>& targets) const {
  const auto source = pad_right(inputs, pad_id_);
  const auto target = pad_right(targets, pad_id_);
  Batch result;
  result.inputs.input_ids_BT = source.ids.to(device_);
  result.inputs.attention_mask_BT = source.mask.to(device_);
  result.inputs.labels_BU = target.ids.masked_fill(target.mask == 0, -100).to(device_);
  for (const auto& row : targets) result.num_units += static_cast<double>(row.size());
  return result;
}

Batch Objective::text_batch(std::span<const tasks::Encoded* const> examples) const {
  std::vector<std::vector<std::int32_t>> inputs, targets;
  for (const auto* example : examples) {
    inputs.push_back(example->ids);
    targets.push_back(example->target_ids);
  }
  return batch(inputs, targets);
}

Tensor Objective::loss_sum(const Batch& batch, const Tensor& logits) const { return loss_sum(batch, logits, {}); }

Tensor Objective::training_loss_sum(const Batch& batch, const Tensor& logits) const {
  return loss_sum(batch, logits, training_);
}

Tensor Objective::loss_sum(const Batch& batch, const Tensor& logits, const TrainingLoss& options) const {
  const auto reduction = torch::Reduction::Sum;
  auto wide = widened(logits);
  if (batch.inputs.labels_BU.defined()) {
    return at::cross_entropy_loss(wide.flatten(0, 1), batch.inputs.labels_BU.flatten(), {}, reduction, -100,
                                  options.label_smoothing);
  }
  if (batch.labelled_B.defined()) wide = wide.index({batch.labelled_B});
  if (kind_ == tasks::Kind::kRegression) {
    return at::mse_loss(wide.squeeze(1), batch.gold_B.to(wide.scalar_type()), reduction);
  }
  std::optional<Tensor> weight_C;
  if (!options.class_weights.empty()) weight_C = torch::tensor(options.class_weights, at::kDouble).to(wide.options());
  return at::cross_entropy_loss(wide, batch.gold_B, weight_C, reduction, -100, options.label_smoothing);
}

double Objective::training_weight(std::span<const tasks::Encoded* const> examples) const {
  double sum = 0.0;
  for (const auto* example : examples) {
    if (!example->label) continue;
    sum += training_.class_weights.empty() ? 1.0 : training_.class_weights[static_cast<std::size_t>(*example->label)];
  }
  return sum;
}

TrainingLoss TrainingLoss::read(io::JsonObject& training) {
  TrainingLoss loss;
  training.optional("label_smoothing", loss.label_smoothing, {.at_least = 0.0, .below = 1.0});
  if (training.peek("class_weights").is_string()) {
    loss.balanced = true;
    const auto word = training.required<std::string>("class_weights");
    if (word != "balanced") training.fail_value("class_weights", "expected \"balanced\", or a number for each class");
  } else if (training.has("class_weights")) {
    loss.class_weights = training.required<std::vector<double>>("class_weights", {.above = 0.0});
  }
  return loss;
}

std::vector<double> balanced_weights(std::span<const tasks::Encoded> examples, std::span<const std::string> labels,
                                     const std::string& origin) {
  std::vector<double> counts(labels.size());
  double total = 0.0;
  for (const auto& example : examples) {
    if (!example.label) continue;
    counts[static_cast<std::size_t>(*example.label)] += 1.0;
    total += 1.0;
  }
  for (std::size_t c = 0; c < labels.size(); ++c) {
    if (counts[c] == 0.0) {
      fail("{}: got \"balanced\", but class \"{}\" has no training example; give a number for each class", origin,
           labels[c]);
    }
    counts[c] = total / (static_cast<double>(labels.size()) * counts[c]);
  }
  return counts;
}

}  // namespace mergex::evaluation
