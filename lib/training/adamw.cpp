#include <torch/torch.h>

#include "training/optimizer.h"

namespace mergex::training {
namespace {

struct AdamWOptions {
  double learning_rate = 0.0;
  std::vector<double> betas{0.9, 0.999};
  double epsilon = 1e-8;
};

class AdamW : public Optimizer {
 public:
  AdamW(std::vector<TrainedParameter> parameters, const AdamWOptions& options)
      : parameters_(std::move(parameters)), moments_(parameters_.size()), options_(options) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      alike_[{parameters_[i].learning_rate, parameters_[i].weight_decay}].push_back(i);
    }
  }

  double step(double factor) override {
    const torch::NoGradGuard no_grad;
    // One fused call for those that share rate and decay.
    for (const auto& [rate_and_decay, members] : alike_) {
      std::vector<Tensor> values, gradients, exp_avgs, exp_avg_sqs, steps;
      for (const auto i : members) {
        const auto& p = parameters_[i].value;
        if (!p.grad().defined()) continue;
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
      at::_fused_adamw_(values, gradients, exp_avgs, exp_avg_sqs, /*max_exp_avg_sqs=*/{}, steps,
                        rate_and_decay.first * factor, options_.betas[0], options_.betas[1], rate_and_decay.second,
                        options_.epsilon, /*amsgrad=*/false, /*maximize=*/false);
    }
    return options_.learning_rate * factor;
  }

  std::map<std::string, Tensor> state() const override {
    std::map<std::string, Tensor> result;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (!moments_[i].step.defined()) continue;
      const auto& name = parameters_[i].name;
      result.emplace(name + ".exp_avg", moments_[i].exp_avg);
      result.emplace(name + ".exp_avg_sq", moments_[i].exp_avg_sq);
      result.emplace(name + ".step", moments_[i].step);
    }
    return result;
  }

  void restore(const std::map<std::string, Tensor>& state) override {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const auto& name = parameters_[i].name;
      const auto& p = parameters_[i].value;
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

 private:
  struct Moments {
    Tensor exp_avg, exp_avg_sq, step;
  };
  std::vector<TrainedParameter> parameters_;
  std::vector<Moments> moments_;
  std::map<std::pair<double, double>, std::vector<std::size_t>> alike_;  // by learning rate and weight decay
  AdamWOptions options_;
};

}  // namespace

constinit const OptimizerKind kAdamW{
    .name = "adamw",
    .summary = "Adam with decoupled weight decay",
    .paper = "Loshchilov and Hutter 2019, arXiv:1711.05101",
    .has_own_rate = false,
    .configure = [](io::JsonObject& options, std::optional<double> learning_rate) -> MakeOptimizer {
      AdamWOptions o;
      o.learning_rate = *learning_rate;
      options.optional("betas", o.betas, {.at_least = 0.0, .below = 1.0});
      if (o.betas.size() != 2) options.fail_value("betas", "expected two numbers");
      options.optional("epsilon", o.epsilon, {.above = 0.0});
      return [o](std::vector<TrainedParameter> parameters) {
        return std::make_unique<AdamW>(std::move(parameters), o);
      };
    }};

}  // namespace mergex::training
