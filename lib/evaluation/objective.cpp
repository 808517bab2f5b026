#include "evaluation/objective.h"

#include <torch/torch.h>

#include <algorithm>

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

Tensor Objective::loss_sum(const Batch& batch, const Tensor& logits) const {
  const auto reduction = torch::Reduction::Sum;
  auto wide = widened(logits);
  if (kind_ == tasks::Kind::kSpanCorruption) {
    return at::cross_entropy_loss(wide.flatten(0, 1), batch.inputs.labels_BU.flatten(), {}, reduction, -100);
  }
  if (batch.labelled_B.defined()) wide = wide.index({batch.labelled_B});
  if (kind_ == tasks::Kind::kRegression) {
    return at::mse_loss(wide.squeeze(1), batch.gold_B.to(wide.scalar_type()), reduction);
  }
  return at::cross_entropy_loss(wide, batch.gold_B, {}, reduction);
}

}  // namespace mergex::evaluation
