#include <torch/torch.h>

#include "support/catch.h"
#include "support/paths.h"
#include "support/tensors.h"
#include "training/toy.h"

// What decides which weights a run ends with: early stopping and the average of weights.

using namespace mergex;
using test::Toy;
namespace fs = std::filesystem;

namespace {

training::TrainingResult run_with(Toy& toy, const std::string& early_stopping) {
  return training::train(
      test::options_of(R"({"max_steps": 16, "batch_size": 4, "optimizer": {"learning_rate": 0.001}})",
                       fmt::format(R"({{"every": 2, "early_stopping": {}}})", early_stopping)),
      toy.run);
}

}  // namespace

TEST_CASE("early stopping waits for so many evaluations without a gain", "[training][law]") {
  test::TemporaryFolder folder;
  Toy toy(folder.path(), {});
  SECTION("in a row") {
    toy.evaluations = {0.5, 0.4, 0.6, 0.6, 0.55, 0.7, 0.7, 0.7};
    const auto result = run_with(toy, R"({"patience": 2})");
    CHECK(result.steps == 10);  // 0.6 and 0.55 after 0.6
    CHECK(result.stopped_early);
    CHECK(result.best_step == 6);
    // Finished is finished: nothing is trained on.
    CHECK(run_with(toy, R"({"patience": 2})").steps == 10);
  }
  SECTION("by more than min_delta, however slowly the best creeps up") {
    toy.evaluations = {0.50, 0.54, 0.58, 0.59, 0.62, 0.0, 0.0, 0.0};
    const auto result = run_with(toy, R"({"patience": 3, "min_delta": 0.05})");
    CHECK(result.steps == 12);  // 0.58 gained over 0.50; 0.59, 0.62 and 0.0 did not over 0.58
    CHECK(result.best == 0.62);
  }
  SECTION("of a loss") {
    toy.run.higher_is_better = false;
    toy.evaluations = {0.5, 0.4, 0.45, 0.3, 0.2, 0.1, 0.05, 0.01};
    const auto result = run_with(toy, R"({"patience": 2})");
    CHECK(result.steps == 16);
    CHECK(!result.stopped_early);
  }
}

TEST_CASE("the average of weights is what is evaluated and kept; training goes on from the weights", "[training][law]") {
  const double decay = 0.75;
  constexpr const char* section = R"({{"max_steps": {}, "batch_size": 4, "optimizer": {{"learning_rate": 0.01}},
                                   "schedule": {{"name": "constant"}}{}}})";
  const auto num_steps = 5;
  // The weights after each step, from runs without an average.
  std::vector<std::vector<Tensor>> weights;
  for (int steps = 0; steps <= num_steps; ++steps) {
    test::TemporaryFolder folder;
    Toy toy(folder.path(), {});
    training::train(test::options_of(fmt::format(section, steps, "")), toy.run);
    weights.push_back(toy.weights());
  }
  auto expected = weights[0];
  for (int steps = 1; steps <= num_steps; ++steps) {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expected[i] = decay * expected[i] + (1.0 - decay) * weights[static_cast<std::size_t>(steps)][i];
    }
  }
  test::TemporaryFolder folder;
  Toy toy(folder.path(), {});
  std::vector<Tensor> evaluated, written;
  const auto evaluate = toy.run.evaluate;
  toy.run.evaluate = [&] {
    evaluated = toy.weights();
    return evaluate();
  };
  toy.run.write_model = [&](const fs::path&) { written = toy.weights(); };
  training::train(test::options_of(fmt::format(section, num_steps, R"(, "ema": {"decay": 0.75})")), toy.run);
  const auto left = toy.weights();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    test::require_close("evaluated", evaluated[i], expected[i], test::kFloat64);
    CHECK(torch::equal(written[i], evaluated[i]));
    CHECK(torch::equal(left[i], weights.back()[i]));
  }
}

TEST_CASE("selection options: mistakes name their place", "[training]") {
  const auto error = [](const std::string& more, const std::string& evaluation) {
    return test::user_error([&] {
      test::options_of(R"({"epochs": 1, "optimizer": {"learning_rate": 0.1})" + more + "}", evaluation);
    });
  };
  using Catch::Contains;
  CHECK_THAT(error("", R"({"early_stopping": {"patience": 0}})"), Contains("#/early_stopping/patience: got 0"));
  CHECK_THAT(error("", R"({"early_stopping": {"min_delta": 0.1}})"), Contains("\"patience\" is missing"));
  CHECK_THAT(error(R"(, "ema": {"decay": 1.0})", "{}"), Contains("#/ema/decay: got 1.0, expected at least 0 and less than 1"));
  CHECK_THAT(error(R"(, "precision": "bf16")", "{}"), Contains("#/precision: got \"bf16\""));
  CHECK_THAT(error(R"(, "schedule": {"name": "cosin"})", "{}"), Contains("did you mean \"cosine\"?"));
}
