#include "training/trainer.h"

#include <torch/torch.h>

#include "core/error.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/tensors.h"
#include "training/toy.h"

using namespace mergex;
using test::options_of;
using test::Toy;
namespace fs = std::filesystem;

TEST_CASE("E3 accumulation equals the large batch with ragged lengths", "[training][law]") {
  const auto kind = GENERATE(tasks::Kind::kClassification, tasks::Kind::kRegression, tasks::Kind::kSpanCorruption);
  evaluation::TrainingLoss loss;
  if (kind != tasks::Kind::kRegression) loss.label_smoothing = GENERATE(0.0, 0.1);
  if (kind == tasks::Kind::kClassification) loss.class_weights = {0.5, 1.0, 3.0};
  // Noise and balance losses off: at k = n the naive router draws noise, so experts are compared without.
  std::vector<std::vector<Tensor>> results;
  for (const auto& [batch, accumulation] : {std::pair{8, 1}, std::pair{4, 2}, std::pair{1, 8}}) {
    test::TemporaryFolder folder;
    Toy toy(folder.path(), {.kind = kind, .loss = loss});
    training::train(options_of(fmt::format(R"({{"max_steps": 4, "batch_size": {}, "gradient_accumulation": {},
        "optimizer": {{"learning_rate": 0.01}}, "schedule": {{"name": "constant"}}}})", batch, accumulation)), toy.run);
    results.push_back(toy.weights());
  }
  for (std::size_t i = 0; i < results[0].size(); ++i) {
    test::require_close("1x8 = 2x4", results[1][i], results[0][i], {1e-10, 1e-12});
    test::require_close("1x8 = 8x1", results[2][i], results[0][i], {1e-10, 1e-12});
  }
}

TEST_CASE("the best evaluation is kept, reloaded and never below the last", "[training][law]") {
  test::TemporaryFolder folder;
  Toy toy(folder.path(), {});
  toy.evaluations = {0.2, 0.9, 0.5, 0.9};
  const auto result = training::train(options_of(R"({"max_steps": 8, "batch_size": 4, "optimizer": {"learning_rate": 0.001}})",
                                                 R"({"every": 2})"), toy.run);
  CHECK(result.best == 0.9);
  CHECK(result.best_step == 4);  // the first of equal ones
  CHECK(result.best >= result.last);
  CHECK(fs::read_symlink(folder / "checkpoints/best") == "step-4");
  CHECK(toy.read_from == folder / "checkpoints/best");
  CHECK(fs::exists(folder / "checkpoints/step-8"));
  CHECK(!fs::exists(folder / "checkpoints/step-2"));
  CHECK(!fs::exists(folder / "checkpoints/step-6"));
}

TEST_CASE("a loss that is not finite stops the run and names the first tensor", "[training]") {
  test::TemporaryFolder folder;
  Toy toy(folder.path(), {});
  for (auto& [name, p] : toy.run.parameters) {
    if (name == "decoder.block.0.layer.2.DenseReluDense.wo.weight") {
      const torch::NoGradGuard no_grad;
      p.index_put_({0, 0}, std::numeric_limits<double>::infinity());
    }
  }
  try {
    training::train(options_of(R"({"max_steps": 2, "batch_size": 4, "optimizer": {"learning_rate": 0.001}})"), toy.run);
    FAIL("the run went on");
  } catch (const GuardError& error) {
    CHECK(std::string(error.what()).find("decoder.block.0.layer.2.DenseReluDense.wo.weight") != std::string::npos);
  }
}

TEST_CASE("the mixture is made once a step and once an evaluation, whatever the accumulation", "[training][law]") {
  test::TemporaryFolder folder;
  Toy toy(folder.path(), {.experts = R"({"method": "camex", "num_experts": 2, "protocol": "ties"})"});
  int begun = 0;
  toy.run.evaluate = [&] {
    toy.experts.begin(false, nullptr);
    ++begun;
    return training::Evaluation{{{"value", 1.0}}, 1.0};
  };
  training::train(options_of(R"({"max_steps": 5, "batch_size": 2, "gradient_accumulation": 3, "optimizer": {"learning_rate": 0.001}})"), toy.run);
  for (const auto& place : toy.experts.places()) {
    const auto layer = std::dynamic_pointer_cast<routing::ExpertLayer>(place.layer);
    CHECK(layer->num_begun() == 5 + begun);
  }
}

TEST_CASE("schedules", "[training]") {
  training::Schedule linear{.warmup_steps = 2};
  CHECK(linear.factor(0, 20) == 0.0);
  CHECK(linear.factor(1, 20) == 0.5);
  CHECK(linear.factor(2, 20) == 1.0);
  CHECK(linear.factor(11, 20) == 0.5);
  CHECK(linear.factor(20, 20) == 0.0);
  training::Schedule constant{.kind = training::Schedule::Kind::kConstant, .warmup_ratio = 0.1};
  CHECK(constant.factor(0, 20) == 0.0);
  CHECK(constant.factor(2, 20) == 1.0);
  CHECK(constant.factor(19, 20) == 1.0);
}

TEST_CASE("training options: mistakes name their place", "[training]") {
  const auto error = [](const std::string& training) { return test::user_error([&] { options_of(training); }); };
  CHECK(error(R"({"batch_size": 4, "optimizer": {"learning_rate": 0.1}})").find("add one") != std::string::npos);
  CHECK(error(R"({"epochs": 1, "max_steps": 2, "optimizer": {"learning_rate": 0.1}})").find("keep one") != std::string::npos);
  CHECK(error(R"({"epochs": 1, "optimizer": {"learning_rate": -1}})") ==
        "r.json#/optimizer/learning_rate: got -1, expected more than 0 and at most 10");
  CHECK(error(R"({"epochs": 1, "optimizer": {"name": "adam", "learning_rate": 0.1}})").find("did you mean \"adamw\"?") != std::string::npos);
}
