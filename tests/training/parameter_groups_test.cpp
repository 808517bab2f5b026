#include "training/parameter_groups.h"

#include <torch/torch.h>

#include "support/catch.h"
#include "support/paths.h"
#include "training/toy.h"

using namespace mergex;
using Catch::Contains;

namespace {

const std::vector<std::string> kNames{"shared.weight", "encoder.block.0.q.weight", "encoder.block.1.q.weight",
                                      "encoder.block.1.layer_norm.weight"};

training::TrainingOptions with_groups(const std::string& groups) {
  return test::options_of(R"({"epochs": 1, "optimizer": {"learning_rate": 0.1, "weight_decay": 0.01}, "parameter_groups": )" +
                          groups + "}");
}

std::string error(const std::string& groups) {
  return test::user_error([&] { training::match_groups(with_groups(groups).parameter_groups, kNames); });
}

}  // namespace

TEST_CASE("the first group that matches wins; the rest is trained as before", "[training][law]") {
  const auto options = with_groups(R"([{"pattern": "encoder.block.1.*", "learning_rate": 0.5},
                                       {"pattern": "*.q.weight", "weight_decay": 0.2},
                                       {"pattern": "shared.weight", "frozen": true}])");
  std::vector<std::pair<std::string, Tensor>> parameters;
  for (const auto& name : kNames) parameters.emplace_back(name, torch::zeros({1}));
  const auto trained = training::trained_parameters(parameters, options.optimizer, options.parameter_groups);
  REQUIRE(trained.size() == 3);
  CHECK(trained[0].name == kNames[1]);
  CHECK(trained[0].learning_rate == 0.1);
  CHECK(trained[0].weight_decay == 0.2);
  CHECK(trained[1].learning_rate == 0.5);
  CHECK(trained[1].weight_decay == 0.01);
  CHECK(trained[2].learning_rate == 0.5);
  CHECK(trained[2].weight_decay == 0.0);  // a norm does not decay in any group
}

TEST_CASE("parameter groups: mistakes name their place", "[training]") {
  CHECK_THAT(error(R"([{"pattern": "encoder.block.*"}, {"pattern": "encoder.blok.1.q.*"}])"),
             Contains("r.json#/parameter_groups/1/pattern: got \"encoder.blok.1.q.*\", which matches no parameter") &&
                 Contains("the nearest is \"encoder.block.1.q.weight\""));
  CHECK_THAT(error(R"([{"pattern": "*.q.weight"}, {"pattern": "encoder.block.0.*"}])"), Contains("an earlier group"));
  CHECK_THAT(error(R"([{"pattern": "*", "frozen": true}])"), Contains("every parameter is frozen"));
  CHECK_THAT(error(R"([{"pattern": "*", "frozen": true, "learning_rate": 0.1}])"), Contains("keep one"));
  CHECK_THAT(error(R"([{"pattern": "*", "rate": 0.1}])"), Contains("parameter_groups/0: unknown key \"rate\""));
  CHECK_THAT(error(R"({"pattern": "*"})"), Contains("expected an array of objects"));
  CHECK_THAT(test::user_error([] {
               test::options_of(R"({"epochs": 1, "optimizer": {"name": "adafactor"}, "schedule": {"name": "constant"},
                                    "parameter_groups": [{"pattern": "*", "learning_rate": 0.1}]})");
             }),
             Contains("chooses its own"));
}

TEST_CASE("a frozen group stays, the others move with their own rates", "[training][law]") {
  test::TemporaryFolder folder;
  test::Toy toy(folder.path(), {});
  const auto before = toy.weights();
  training::train(test::options_of(R"({"max_steps": 1, "batch_size": 16, "optimizer": {"learning_rate": 0.001},
      "schedule": {"name": "constant"},
      "parameter_groups": [{"pattern": "encoder.*", "frozen": true}, {"pattern": "*.q.weight", "learning_rate": 0.01}]})"),
                  toy.run);
  for (std::size_t i = 0; i < before.size(); ++i) {
    const auto& [name, p] = toy.run.parameters[i];
    const auto moved = (p - before[i]).abs().max().item<double>();
    INFO(name);
    if (name.starts_with("encoder.")) {
      CHECK(moved == 0.0);
      CHECK(!p.grad().defined());
    } else {  // the first step of Adam is the learning rate, but for tiny gradients
      CHECK(moved == Approx(name.ends_with(".q.weight") ? 0.01 : 0.001).epsilon(0.01));
    }
  }
}
