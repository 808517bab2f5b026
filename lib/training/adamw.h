#pragma once

#include <map>
#include <string>
#include <vector>

#include "io/json_object.h"
#include "tensor/tensor.h"

namespace mergex::training {

struct AdamWOptions {
  double learning_rate = 5e-5;
  std::vector<double> betas{0.9, 0.999};
  double epsilon = 1e-8;
  double weight_decay = 0.0;

  /// Reads `training.optimizer`.
  static AdamWOptions read(io::JsonObject options);
};

/// Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101). Biases (T5's relative position
/// bias among them), norms and curvature factors do not decay. A parameter without a gradient is left alone.
class AdamW {
 public:
  AdamW(std::vector<std::pair<std::string, Tensor>> parameters, const AdamWOptions& options);

  void zero_grad();
  /// One update of every parameter that has a gradient.
  void step(double learning_rate);

  /// "<parameter>.exp_avg", ".exp_avg_sq" and ".step" of each parameter that was updated before.
  std::map<std::string, Tensor> state() const;
  /// Takes over what `state()` gave, here or in another process.
  void restore(const std::map<std::string, Tensor>& state);

 private:
  struct Moments {
    Tensor exp_avg, exp_avg_sq, step;
  };
  std::vector<std::pair<std::string, Tensor>> parameters_;
  std::vector<Moments> moments_;
  AdamWOptions options_;
};

/// Whether weight decay applies to a parameter of this name.
bool decays(const std::string& parameter);

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)). @return the norm before; max_norm 0: measured only
double clip_gradients(const std::vector<std::pair<std::string, Tensor>>& parameters, double max_norm);

}  // namespace mergex::training
