#include "evaluation/evaluate.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "core/interrupt.h"
#include "statistics/registry.h"
#include "tasks/text_to_text.h"

namespace mergex::evaluation {

double SplitResult::value(const std::string& metric) const {
  if (metric == "loss") return loss;
  for (const auto& score : scores) {
    if (score.metric == metric) return score.defined ? score.value : std::nan("");
  }
  throw std::logic_error("metric " + metric + " was not computed");
}

namespace {

void check_finite(const SplitResult& result) {
  if (std::isfinite(result.loss)) return;
  throw GuardError(fmt::format(
      "evaluation on {}: the loss is not finite; lower /training/optimizer/learning_rate, or check the checkpoint",
      result.name));
}

}  // namespace

io::Json SplitResult::to_json() const {
  io::Json json{{"split", name}, {"n", num_scored}, {"loss", loss}};
  for (const auto& score : scores) json[score.metric] = score.defined ? io::Json(score.value) : io::Json(nullptr);
  if (unparsable) json["unparsable"] = *unparsable;
  if (collapsed) json["collapsed"] = *collapsed;
  return json;
}

std::vector<std::size_t> batch_order(const std::vector<tasks::Encoded>& examples, bool by_length) {
  std::vector<std::size_t> order(examples.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (by_length) {
    std::ranges::stable_sort(order, std::ranges::greater(), [&](std::size_t i) { return examples[i].ids.size(); });
  }
  return order;
}

SplitResult evaluate_split(backbones::Backbone& model, const Objective& objective, tasks::Kind kind,
                           const std::string& name, const std::vector<tasks::Encoded>& examples,
                           std::span<const std::size_t> order, const std::vector<std::string>& metrics,
                           const std::vector<std::string>& labels, std::int64_t batch_size) {
  const torch::NoGradGuard no_grad;
  SplitResult result{.name = name};
  result.predictions.resize(examples.size());
  double loss_sum = 0.0;
  for (std::size_t at = 0; at < order.size(); at += static_cast<std::size_t>(batch_size)) {
    throw_if_interrupted();
    const auto indices = order.subspan(at, std::min(static_cast<std::size_t>(batch_size), order.size() - at));
    std::vector<const tasks::Encoded*> members;
    for (const auto i : indices) members.push_back(&examples[i]);
    const auto batch = objective.batch(members);
    nn::ForwardContext context;
    const auto logits_BC = model.forward(batch.inputs, context);
    if (batch.num_units > 0) loss_sum += objective.loss_sum(batch, logits_BC).item<double>();
    const auto on_cpu = logits_BC.to(at::kCPU, at::kFloat).contiguous();
    const auto* row = on_cpu.const_data_ptr<float>();
    for (const auto i : indices) {
      Prediction p{.gold = examples[i].label, .logits = {row, row + on_cpu.size(1)}};
      row += on_cpu.size(1);
      p.predicted = kind == tasks::Kind::kRegression
                        ? static_cast<double>(p.logits[0])
                        : static_cast<double>(std::ranges::max_element(p.logits) - p.logits.begin());
      result.predictions[i] = std::move(p);
    }
  }

  std::vector<int> gold_classes, predicted_classes, all_classes;
  std::vector<double> gold_scores, predicted_scores, all_scores;
  for (const auto& p : result.predictions) {
    if (kind == tasks::Kind::kRegression) {
      all_scores.push_back(p.predicted);
      if (p.gold) {
        gold_scores.push_back(*p.gold);
        predicted_scores.push_back(p.predicted);
      }
    } else {
      all_classes.push_back(static_cast<int>(p.predicted));
      if (p.gold) {
        gold_classes.push_back(static_cast<int>(*p.gold));
        predicted_classes.push_back(static_cast<int>(p.predicted));
      }
    }
  }
  result.num_scored = static_cast<std::int64_t>(gold_classes.size() + gold_scores.size());
  if (result.num_scored > 0) {
    result.loss = loss_sum / static_cast<double>(result.num_scored);
    check_finite(result);
    for (const auto& metric_name : metrics) {
      const auto& metric = statistics::find_metric(metric_name);
      result.scores.push_back(kind == tasks::Kind::kRegression
                                  ? statistics::score(metric, gold_scores, predicted_scores)
                                  : statistics::score(metric, gold_classes, predicted_classes));
    }
  }
  result.collapsed = kind == tasks::Kind::kRegression
                         ? statistics::collapse(all_scores)
                         : statistics::collapse(std::span<const int>(all_classes), labels);
  return result;
}

SplitResult evaluate_generated(backbones::Backbone& model, const Objective& objective, tasks::Kind kind,
                               const std::string& name, const std::vector<tasks::Encoded>& examples,
                               const std::vector<std::string>& metrics, const std::vector<std::string>& labels,
                               std::int64_t batch_size, const text::T5Tokenizer& tokenizer) {
  const torch::NoGradGuard no_grad;
  std::size_t max_new_tokens = 0;
  for (const auto& target : tasks::possible_targets(labels)) {
    max_new_tokens = std::max(max_new_tokens, tokenizer.encode(target).size() + 1);  // and the end token
  }
  SplitResult result{.name = name, .unparsable = 0};
  double loss_sum = 0.0, num_tokens = 0.0;
  for (std::size_t at = 0; at < examples.size(); at += static_cast<std::size_t>(batch_size)) {
    throw_if_interrupted();
    std::vector<const tasks::Encoded*> members;
    for (std::size_t i = at; i < std::min(examples.size(), at + static_cast<std::size_t>(batch_size)); ++i) {
      members.push_back(&examples[i]);
    }
    const auto batch = objective.text_batch(members);
    if (batch.num_units > 0) {
      nn::ForwardContext context;
      loss_sum += objective.loss_sum(batch, model.forward(batch.inputs, context)).item<double>();
      num_tokens += batch.num_units;
    }
    nn::ForwardContext context;
    const auto ids_BU = model
                            .generate(batch.inputs.input_ids_BT, batch.inputs.attention_mask_BT,
                                      static_cast<std::int64_t>(max_new_tokens), tokenizer.eos_id(), context)
                            .to(at::kCPU, at::kInt)
                            .contiguous();
    const auto* row = ids_BU.const_data_ptr<std::int32_t>();
    for (const auto* example : members) {
      Prediction p{.gold = example->label};
      p.text = tokenizer.decode({row, static_cast<std::size_t>(ids_BU.size(1))}, /*skip_special=*/true);
      row += ids_BU.size(1);
      const auto parsed = tasks::parse_target(p.text, labels);
      p.is_parsable = parsed.has_value();
      p.predicted = parsed.value_or(-1.0);
      if (p.gold && !p.is_parsable) ++*result.unparsable;
      result.predictions.push_back(std::move(p));
    }
  }
  std::vector<double> gold, predicted, all;
  for (const auto& p : result.predictions) {
    all.push_back(p.predicted);
    if (!p.gold) continue;
    gold.push_back(*p.gold);
    predicted.push_back(p.predicted);
  }
  const std::vector<int> gold_classes(gold.begin(), gold.end()), predicted_classes(predicted.begin(), predicted.end()),
      all_classes(all.begin(), all.end());
  const bool is_regression = kind == tasks::Kind::kRegression;
  result.num_scored = std::ssize(gold);
  if (result.num_scored > 0) {
    result.loss = loss_sum / num_tokens;
    check_finite(result);
    for (const auto& metric : metrics) {
      const auto& entry = statistics::find_metric(metric == "f1" ? "f1_with_invalid" : metric);
      result.scores.push_back(is_regression ? statistics::score(entry, gold, predicted)
                                            : statistics::score(entry, gold_classes, predicted_classes));
      result.scores.back().metric = metric;
    }
  }
  result.collapsed = is_regression ? statistics::collapse(all)
                                   : statistics::collapse(std::span<const int>(all_classes), labels);
  return result;
}

SplitResult evaluate_loss(backbones::Backbone& model, const Objective& objective, const std::string& name,
                          std::span<const std::size_t> order, std::int64_t batch_size,
                          const std::function<Batch(std::span<const std::size_t> examples)>& make_batch) {
  const torch::NoGradGuard no_grad;
  SplitResult result{.name = name};
  double loss_sum = 0.0, units = 0.0;
  for (std::size_t at = 0; at < order.size(); at += static_cast<std::size_t>(batch_size)) {
    throw_if_interrupted();
    const auto batch = make_batch(order.subspan(at, std::min(static_cast<std::size_t>(batch_size), order.size() - at)));
    nn::ForwardContext context;
    loss_sum += objective.loss_sum(batch, model.forward(batch.inputs, context)).item<double>();
    units += batch.num_units;
  }
  result.num_scored = static_cast<std::int64_t>(units);
  result.loss = loss_sum / units;
  check_finite(result);
  return result;
}

}  // namespace mergex::evaluation
