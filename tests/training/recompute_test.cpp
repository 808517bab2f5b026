#include <torch/torch.h>

#include "io/atomic_file.h"
#include "routing/noisy_top_k.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/tensors.h"
#include "training/toy.h"

using namespace mergex;
using test::Toy;

namespace {

constexpr const char* kDense = "";
constexpr const char* kCamex =
    R"({"method": "camex", "num_experts": 3, "protocol": "dare", "curvature": {"rank": 2}, "auxiliary_loss": 0.01})";
constexpr const char* kSmoe = R"({"method": "smoe", "num_experts": 3, "auxiliary_loss": 0.01})";

struct Outcome {
  std::vector<Tensor> weights = {}, gradients = {};
  std::string metrics;
};

Outcome train(const test::ToyOptions& options, bool recomputes, const std::string& more = "") {
  test::TemporaryFolder folder;
  Toy toy(folder.path(), options);
  training::train(test::options_of(fmt::format(
                      R"({{"max_steps": 3, "batch_size": 4, "gradient_accumulation": 2, "log_every": 1,
                           "optimizer": {{"learning_rate": 0.01}}, "activation_checkpointing": {}{}}})",
                      recomputes, more)),
                  toy.run);
  Outcome outcome{.weights = toy.weights(), .metrics = io::read_file(folder / "metrics.jsonl")};
  for (const auto& [name, p] : toy.run.parameters) outcome.gradients.push_back(p.grad());
  return outcome;
}

void check_same(const Outcome& a, const Outcome& b) {
  CHECK(a.metrics == b.metrics);
  for (std::size_t i = 0; i < a.weights.size(); ++i) {
    INFO(i);
    CHECK(torch::equal(a.weights[i], b.weights[i]));
    REQUIRE(a.gradients[i].defined() == b.gradients[i].defined());
    if (a.gradients[i].defined()) CHECK(torch::equal(a.gradients[i], b.gradients[i]));
  }
}

}  // namespace

TEST_CASE("activation checkpointing changes no bit of losses, gradients and weights (E4, E12)", "[training][law]") {
  const auto kind = GENERATE(tasks::Kind::kClassification, tasks::Kind::kSpanCorruption);
  const std::string experts = GENERATE(kDense, kCamex, kSmoe);
  if (kind == tasks::Kind::kSpanCorruption && experts == kCamex) return;  // does not generate
  INFO(experts);
  const test::ToyOptions options{
      .kind = kind, .experts = experts, .dtype = at::kFloat, .dropout = 0.1, .num_layers = 3};
  check_same(train(options, false), train(options, true));
}

TEST_CASE("activation checkpointing trains what lies in blocks where nothing before them is trained (E4)",
          "[training][law]") {
  const std::string frozen = R"(, "parameter_groups": [{"pattern": "shared.weight", "frozen": true},
                                                        {"pattern": "*relative_attention_bias*", "frozen": true}])";
  const test::ToyOptions options{.experts = kCamex, .dropout = 0.1, .num_layers = 2};
  const auto kept = train(options, false, frozen), recomputed = train(options, true, frozen);
  check_same(kept, recomputed);
  int num_without = 0;
  for (const auto& gradient : recomputed.gradients) num_without += gradient.defined() ? 0 : 1;
  CHECK(num_without == 3);
}

TEST_CASE("activation checkpointing in bfloat16 changes no bit", "[training][law]") {
  const std::string precision = R"(, "precision": "bfloat16")";
  const test::ToyOptions options{.experts = kCamex, .dtype = at::kFloat, .dropout = 0.1, .num_layers = 2};
  check_same(train(options, false, precision), train(options, true, precision));
}

TEST_CASE("the router has a gradient exactly when the recipe says so (E12)", "[training][law]") {
  const bool recomputes = GENERATE(false, true);
  // At the start all experts are copies: task vectors are zero, so the task alone tells the router nothing.
  const auto gradient = [&](const std::string& auxiliary) {
    test::TemporaryFolder folder;
    Toy toy(folder.path(), {.experts = fmt::format(
        R"({{"method": "camex", "num_experts": 3, "form": "base", "auxiliary_loss": {}}})", auxiliary)});
    training::train(test::options_of(fmt::format(
                        R"({{"max_steps": 1, "batch_size": 16, "optimizer": {{"learning_rate": 0.001}},
                             "max_grad_norm": 0, "activation_checkpointing": {}}})", recomputes)), toy.run);
    return toy.parameter("encoder.block.0.layer.1.DenseReluDense.wi.router.w_gate").grad();
  };
  CHECK(gradient("0").abs().max().item<double>() == 0.0);
  const auto once = gradient("0.01");
  CHECK(once.abs().max().item<double>() > 0.0);
  // Counted once: linear in the coefficient, and the same number with recomputation.
  test::require_close("twice the coefficient", gradient("0.02"), 2.0 * once, test::kFloat64);
}

TEST_CASE("a balance loss at perfect balance has a finite gradient (E12)", "[training][law]") {
  const bool recomputes = GENERATE(false, true);
  const std::string experts = GENERATE(R"({"method": "camex", "num_experts": 1, "auxiliary_loss": 0.1})",
                                       R"({"method": "smoe", "num_experts": 1, "auxiliary_loss": 0.1})");
  const auto outcome = train({.experts = experts}, recomputes);
  for (const auto& gradient : outcome.gradients) {
    if (gradient.defined()) CHECK(gradient.isfinite().all().item<bool>());
  }
  // Several experts in balance: a router that says nothing, without noise.
  const auto w_gate = torch::zeros({4, 3}, at::kDouble).requires_grad_(true);
  const auto gating = routing::noisy_top_k(test::seeded_normal({5, 4}, 1), w_gate, torch::zeros({4, 3}, at::kDouble), {}, 3);
  const auto loss = routing::balance_loss(gating, 0.1);
  loss.backward();
  CHECK(loss.item<double>() < 1e-15);
  CHECK(w_gate.grad().abs().max().item<double>() < 1e-15);
}
