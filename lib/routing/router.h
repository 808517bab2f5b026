#pragma once

#include <memory>
#include <span>
#include <string>

#include "io/json_object.h"
#include "nn/forward_context.h"
#include <torch/nn/module.h>

namespace mergex::routing {

// U routed units (sentences or tokens), D features, N experts

struct RouterOutput {
  Tensor scores_UN;       ///< >= 0; each row sums to 1, but see ConfiguredRouter::scores_sum_to_one
  Tensor auxiliary_loss;  ///< scalar, already scaled; undefined where the coefficient is 0
};

struct Router : torch::nn::Module {
  virtual RouterOutput forward(const Tensor& z_UD, nn::ForwardContext& context) = 0;
  virtual void initialize(at::Generator& generator) = 0;
};

struct RouterShape {
  std::int64_t in_features, num_experts;
  double auxiliary_coefficient;
  at::TensorOptions tensors;
};

using MakeRouter = std::function<std::shared_ptr<Router>(const RouterShape&)>;

/// A router whose options are read.
struct ConfiguredRouter {
  MakeRouter make;
  std::int64_t top_k;             ///< the most experts of a unit with a score above zero
  bool scores_sum_to_one = true;  ///< while training; in evaluation they always do
};

/// A kind of router as recipes name it.
struct RouterKind {
  const char* name;
  const char* summary;
  const char* paper;
  bool has_balance_loss;
  /// Reads the options of `experts.router`.
  ConfiguredRouter (*configure)(io::JsonObject& options, std::int64_t num_experts, std::int64_t default_top_k);
};

std::span<const RouterKind* const> router_registry();

}  // namespace mergex::routing
