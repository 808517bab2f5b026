#include "training/adamw.h"

#include <torch/torch.h>

namespace mergex::training {

AdamWOptions AdamWOptions::read(io::JsonObject options) {
  AdamWOptions o;
  options.choice("name", std::vector<std::string>{"adamw"}, 0);
  o.learning_rate = options.required<double>("learning_rate", {.above = 0.0, .at_most = 10.0});
  options.optional("betas", o.betas, {.at_least = 0.0, .below = 1.0});
  if (o.betas.size() != 2) options.fail_value("betas", "expected two numbers");
  options.optional("epsilon", o.epsilon, {.above = 0.0});
  options.optional("weight_decay", o.weight_decay, {.at_least = 0.0});
  options.finish();
  return o;
}

bool decays(const std::string& parameter) {
  return parameter.find("bias") == std::string::npos && !parameter.ends_with("norm.weight") &&
         parameter.find(".curvature.") == std::string::npos;
}

AdamW::AdamW(std::vector<std::pair<std::string, Tensor>> parameters, const AdamWOptions& options)
    : parameters_(std::move(parameters)), moments_(parameters_.size()), options_(options) {}

void AdamW::zero_grad() {
  for (auto& [name, p] : parameters_) p.mutable_grad() = Tensor();
}

void AdamW::step(double learning_rate) {
  const torch::NoGradGuard no_grad;
  // One fused call for those that decay and one for the rest.
  for (const bool decay : {true, false}) {
    std::vector<Tensor> values, gradients, exp_avgs, exp_avg_sqs, steps;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      auto& [name, p] = parameters_[i];
      if (!p.grad().defined() || decays(name) != decay) continue;
      auto& m = moments_[i];
      if (!m.step.defined()) {
        m.exp_avg = torch::zeros_like(p);
        m.exp_avg_sq = torch::zeros_like(p);
        m.step = torch::zeros({}, p.options().dtype(at::kFloat).requires_grad(false));
      }
      m.step.add_(1);  // the fused kernel expects the number of the step that it takes
      values.push_back(p);
      gradients.push_back(p.grad());
      exp_avgs.push_back(m.exp_avg);
      exp_avg_sqs.push_back(m.exp_avg_sq);
      steps.push_back(m.step);
    }
    if (values.empty()) continue;
    at::_fused_adamw_(values, gradients, exp_avgs, exp_avg_sqs, /*max_exp_avg_sqs=*/{}, steps, learning_rate,
                      options_.betas[0], options_.betas[1], decay ? options_.weight_decay : 0.0, options_.epsilon,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
}

std::map<std::string, Tensor> AdamW::state() const {
  std::map<std::string, Tensor> result;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!moments_[i].step.defined()) continue;
    const auto& name = parameters_[i].first;
    result.emplace(name + ".exp_avg", moments_[i].exp_avg);
    result.emplace(name + ".exp_avg_sq", moments_[i].exp_avg_sq);
    result.emplace(name + ".step", moments_[i].step);
  }
  return result;
}

void AdamW::restore(const std::map<std::string, Tensor>& state) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, p] = parameters_[i];
    const auto found = state.find(name + ".step");
    if (found == state.end()) {
      moments_[i] = {};
      continue;
    }
    moments_[i] = {state.at(name + ".exp_avg").to(p.device(), p.scalar_type()),
                   state.at(name + ".exp_avg_sq").to(p.device(), p.scalar_type()),
                   found->second.to(p.device(), at::kFloat)};
  }
}

double clip_gradients(const std::vector<std::pair<std::string, Tensor>>& parameters, double max_norm) {
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> gradients;
  for (const auto& [name, p] : parameters) {
    if (p.grad().defined()) gradients.push_back(p.grad());
  }
  if (gradients.empty()) return 0.0;
  const auto norm = torch::stack(at::_foreach_norm(gradients, 2)).norm().item<double>();
  if (max_norm > 0.0) {
    const auto scale = std::min(1.0, max_norm / (norm + 1e-6));
    if (scale < 1.0) at::_foreach_mul_(gradients, scale);
  }
  return norm;
}

}  // namespace mergex::training
