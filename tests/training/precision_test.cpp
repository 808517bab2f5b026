#include "training/precision.h"

#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "core/error.h"
#include "io/atomic_file.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/tensors.h"
#include "training/toy.h"

using namespace mergex;
using Catch::Contains;
using test::Toy;

namespace {

training::TrainingOptions in_precision(const std::string& precision, int steps) {
  return test::options_of(fmt::format(
      R"({{"max_steps": {}, "batch_size": 16, "log_every": 1, "optimizer": {{"learning_rate": 0.01}},
           "schedule": {{"name": "constant"}}, "precision": "{}"}})", steps, precision));
}

/// Losses and gradient norms of a run.
std::vector<std::pair<double, double>> train(const std::string& precision, const std::string& experts) {
  test::TemporaryFolder folder;
  Toy toy(folder.path(), {.experts = experts, .dtype = at::kFloat, .num_layers = 2});
  training::train(in_precision(precision, 8), toy.run);
  std::vector<std::pair<double, double>> lines;
  std::istringstream in(io::read_file(folder / "metrics.jsonl"));
  for (std::string line; std::getline(in, line);) {
    const auto json = io::parse_json(line, "metrics.jsonl");
    // A step that float16 skipped is made up for by a later one: all take the same 16 sentences.
    if (json.contains("loss") && !json["grad_norm"].is_null()) lines.emplace_back(json["loss"], json["grad_norm"]);
  }
  for (const auto& [name, p] : toy.run.parameters) CHECK(p.scalar_type() == at::kFloat);
  return lines;
}

/// A T5 whose first feed-forward answers with about 200,000.
void widen_first_feed_forward(Toy& toy) {
  const torch::NoGradGuard no_grad;
  Tensor(toy.parameter("encoder.block.0.layer.1.DenseReluDense.wo.weight")).fill_(5e4);
}

}  // namespace

TEST_CASE("half precisions follow float32", "[training][law]") {
  const std::string experts = GENERATE(
      "", R"({"method": "camex", "num_experts": 2, "protocol": "ties", "curvature": {"rank": 1}})",
      R"({"method": "smoe", "num_experts": 2})");
  const auto [precision, tolerance] = GENERATE(std::pair{"bfloat16", 0.05}, std::pair{"float16", 0.01});
  INFO(precision << " " << experts);
  const auto wide = train("float32", experts), narrow = train(precision, experts);
  REQUIRE(narrow.size() >= 4);
  CHECK(narrow[0].first != wide[0].first);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(narrow[i].first == Approx(wide[i].first).epsilon(tolerance));
    // float16's loss scale is out of the gradients again before they are measured.
    CHECK(narrow[i].second == Approx(wide[i].second).epsilon(3 * tolerance));
  }
}

TEST_CASE("a T5 that overflows float16 stops with the layer's name, and trains in bfloat16 (E1)", "[training][law]") {
  test::TemporaryFolder folder;
  Toy half(folder / "half", {.dtype = at::kFloat});
  widen_first_feed_forward(half);
  try {
    training::train(in_precision("float16", 2), half.run);
    FAIL("the run went on");
  } catch (const GuardError& error) {
    CHECK_THAT(error.what(), Contains("step 0") && Contains("encoder.block.0.layer.1.DenseReluDense;") &&
                                 Contains("set /training/precision to bfloat16"));
  }
  Toy brain(folder / "brain", {.dtype = at::kFloat});
  widen_first_feed_forward(brain);
  const auto& head = brain.parameter("classification_head.out_proj.weight");
  const auto before = head.detach().clone();
  training::train(in_precision("bfloat16", 2), brain.run);
  for (const auto& [name, p] : brain.run.parameters) CHECK(p.isfinite().all().item<bool>());
  CHECK(!torch::equal(head, before));
}

TEST_CASE("gradients that overflow float16 skip the step and halve the loss scale", "[training][law]") {
  test::TemporaryFolder folder;
  Toy toy(folder.path(), {.dtype = at::kFloat});
  const auto p = toy.parameter("shared.weight");
  const auto units = toy.run.count_units;
  double factor = 2.0;
  // Its gradient in float16 is factor times the scale: beyond 65504 at 65536 and 32768, not at 16384.
  toy.run.loss_sum = [&](std::span<const std::size_t> examples, std::int64_t epoch, nn::ForwardContext&) {
    return (p.sum().to(at::kHalf) * factor).to(at::kFloat) * units(examples, epoch);
  };
  const auto before = p.detach().clone();
  training::train(in_precision("float16", 2), toy.run);
  CHECK(torch::equal(p, before));
  const auto metrics = io::read_file(folder / "metrics.jsonl");
  CHECK_THAT(metrics, Contains("\"learning_rate\":0.0") && Contains("\"grad_norm\":null"));
  training::train(in_precision("float16", 3), toy.run);  // goes on from step 2, the scale with it
  CHECK(!torch::equal(p, before));

  test::TemporaryFolder other;
  Toy hopeless(other.path(), {.dtype = at::kFloat});
  const auto q = hopeless.parameter("shared.weight");
  hopeless.run.loss_sum = [&](std::span<const std::size_t>, std::int64_t, nn::ForwardContext&) {
    return torch::sqrt(q.square().sum() * 0.0);  // an infinite gradient at a finite loss
  };
  CHECK_THROWS_AS(training::train(in_precision("float16", 40), hopeless.run), GuardError);
}

TEST_CASE("the loss scale grows after 2,000 good steps and is saved", "[training]") {
  training::LossScale scale(at::kHalf);
  const auto value = [](const training::LossScale& s) { return s.scaled(torch::ones({})).item<double>(); };
  CHECK(value(scale) == 65536.0);
  CHECK(scale.overflowed(false));
  CHECK(value(scale) == 32768.0);
  for (int i = 0; i < 1999; ++i) CHECK(!scale.overflowed(true));
  training::TrainingState state;
  scale.save(state);
  training::LossScale other(at::kHalf);
  other.restore(state);
  CHECK(!other.overflowed(true));
  CHECK(value(other) == 65536.0);
  training::LossScale inactive(at::kBFloat16);
  CHECK(value(inactive) == 1.0);
  CHECK(!inactive.overflowed(false));
}
