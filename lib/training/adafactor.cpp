#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "training/optimizer.h"

namespace mergex::training {
namespace {

struct AdafactorOptions {
  std::optional<double> learning_rate;
  bool relative_step = false;    // rate min(1e-2, 1/sqrt(step)) instead of a given one
  bool warmup_init = false;      // relative_step: rises from 1e-6 a step instead of starting at 1e-2
  bool scale_parameter = true;   // rates are relative to a parameter's root mean square, or eps2 where that is larger
  double clip_threshold = 1.0;   // of an update's root mean square
  double decay_rate = -0.8;      // the second moment forgets by 1 - step^decay_rate
  double eps1 = 1e-30, eps2 = 1e-3;
  std::optional<double> beta1;   // absent: no first moment
};

Tensor root_mean_square(const Tensor& t) { return t.norm() / std::sqrt(static_cast<double>(t.numel())); }

/// Source: Shazeer and Stern 2018, algorithms 4 to 6 (arXiv:1804.04235). A tensor of more than two dimensions is a
/// batch of matrices.
class Adafactor : public Optimizer {
 public:
  Adafactor(std::vector<TrainedParameter> parameters, const AdafactorOptions& options)
      : parameters_(std::move(parameters)), moments_(parameters_.size()), o_(options) {}

  double step(double factor) override {
    const torch::NoGradGuard no_grad;
    double logged = o_.relative_step ? 0.0 : *o_.learning_rate * factor;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const auto& p = parameters_[i];
      if (!p.value.grad().defined()) continue;
      auto& m = moments_[i];
      if (m.step == 0) start(m, p.value);
      ++m.step;
      const auto rate = o_.relative_step ? relative_rate(m.step) : p.learning_rate * factor;
      if (o_.relative_step) logged = rate;
      update(p, m, rate);
    }
    return logged;
  }

  std::map<std::string, Tensor> state() const override {
    std::map<std::string, Tensor> result;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const auto& m = moments_[i];
      if (m.step == 0) continue;
      const auto& name = parameters_[i].name;
      result.emplace(name + ".step", torch::tensor(m.step));
      for (const auto& [what, moment] : kMoments) {
        if ((m.*moment).defined()) result.emplace(name + "." + what, m.*moment);
      }
    }
    return result;
  }

  void restore(const std::map<std::string, Tensor>& state) override {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const auto& name = parameters_[i].name;
      const auto& p = parameters_[i].value;
      auto& m = moments_[i];
      m = {};
      const auto found = state.find(name + ".step");
      if (found == state.end()) continue;
      m.step = found->second.item<std::int64_t>();
      for (const auto& [what, moment] : kMoments) {
        const auto saved = state.find(name + "." + what);
        if (saved != state.end()) m.*moment = saved->second.to(p.device(), p.scalar_type());
      }
    }
  }

 private:
  struct Moments {
    std::int64_t step = 0;
    Tensor row, column;  // factored second moment of matrices
    Tensor square;       // second moment of vectors
    Tensor average;      // first moment, with beta1
  };
  static constexpr std::array<std::pair<const char*, Tensor Moments::*>, 4> kMoments{
      {{"exp_avg_sq_row", &Moments::row},
       {"exp_avg_sq_col", &Moments::column},
       {"exp_avg_sq", &Moments::square},
       {"exp_avg", &Moments::average}}};

  void start(Moments& m, const Tensor& p) const {
    if (p.dim() >= 2) {
      m.row = torch::zeros_like(p.detach().select(-1, 0), at::MemoryFormat::Contiguous);
      m.column = torch::zeros_like(p.detach().select(-2, 0), at::MemoryFormat::Contiguous);
    } else {
      m.square = torch::zeros_like(p.detach());
    }
    if (o_.beta1) m.average = torch::zeros_like(p.detach());
  }

  double relative_rate(std::int64_t step) const {
    const auto t = static_cast<double>(step);
    return std::min(o_.warmup_init ? 1e-6 * t : 1e-2, 1.0 / std::sqrt(t));
  }

  void update(const TrainedParameter& p, Moments& m, double rate) const {
    const auto& gradient = p.value.grad();
    auto scaled_rate = torch::full({}, rate, gradient.options());
    if (o_.scale_parameter) scaled_rate = scaled_rate * root_mean_square(p.value).clamp_min(o_.eps2);
    const auto beta2 = 1.0 - std::pow(static_cast<double>(m.step), o_.decay_rate);
    const auto square = gradient.square() + o_.eps1;
    Tensor change;
    if (m.row.defined()) {
      m.row.mul_(beta2).add_(square.mean(-1), 1.0 - beta2);
      m.column.mul_(beta2).add_(square.mean(-2), 1.0 - beta2);
      const auto row = (m.row / m.row.mean(-1, /*keepdim=*/true)).rsqrt_().unsqueeze(-1);
      change = row * m.column.unsqueeze(-2).rsqrt() * gradient;
    } else {
      m.square.mul_(beta2).add_(square, 1.0 - beta2);
      change = m.square.rsqrt() * gradient;
    }
    change.div_((root_mean_square(change) / o_.clip_threshold).clamp_min_(1.0)).mul_(scaled_rate);
    if (o_.beta1) change = m.average.mul_(*o_.beta1).add_(change, 1.0 - *o_.beta1);
    auto value = p.value;
    if (p.weight_decay != 0.0) value.mul_(1.0 - p.weight_decay * scaled_rate);
    value.sub_(change);
  }

  std::vector<TrainedParameter> parameters_;
  std::vector<Moments> moments_;
  AdafactorOptions o_;
};

}  // namespace

constinit const OptimizerKind kAdafactor{
    .name = "adafactor",
    .summary = "second moments by row and column, updates of bounded size",
    .paper = "Shazeer and Stern 2018, arXiv:1804.04235",
    .has_own_rate = true,
    .configure = [](io::JsonObject& options, std::optional<double> learning_rate) -> MakeOptimizer {
      AdafactorOptions o;
      o.learning_rate = learning_rate;
      o.relative_step = !learning_rate;
      options.optional("relative_step", o.relative_step);
      if (o.relative_step == learning_rate.has_value()) {
        options.fail_value("relative_step", learning_rate ? "but learning_rate is given too; keep one"
                                                          : "but learning_rate is missing; add it, or set this to true");
      }
      options.optional("warmup_init", o.warmup_init);
      if (o.warmup_init && !o.relative_step) {
        options.fail_value("warmup_init", "which only relative_step has; remove learning_rate, or use schedule/warmup_steps");
      }
      options.optional("scale_parameter", o.scale_parameter);
      options.optional("clip_threshold", o.clip_threshold, {.above = 0.0});
      options.optional("decay_rate", o.decay_rate, {.at_least = -10.0, .below = 0.0});
      options.optional("eps1", o.eps1, {.above = 0.0});
      options.optional("eps2", o.eps2, {.at_least = 0.0});
      o.beta1 = options.maybe<double>("beta1", {.at_least = 0.0, .below = 1.0});
      return [o](std::vector<TrainedParameter> parameters) {
        return std::make_unique<Adafactor>(std::move(parameters), o);
      };
    }};

}  // namespace mergex::training
