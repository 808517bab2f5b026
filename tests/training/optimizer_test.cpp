#include "training/optimizer.h"

#include <torch/torch.h>

#include <set>

#include "io/atomic_file.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/tensors.h"
#include "training/gradients.h"
#include "training/parameter_groups.h"
#include "training/schedule.h"
#include "training/toy.h"

using namespace mergex;
using test::object_of;

namespace {

/// Tensors as a list of their entries.
std::vector<Tensor> tensors_of(const io::Json& values, const io::Json& shapes) {
  std::vector<Tensor> result;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    result.push_back(torch::tensor(values[i].get<std::vector<double>>(), at::kDouble)
                         .view(shapes[i].get<std::vector<std::int64_t>>())
                         .clone());
  }
  return result;
}

std::vector<std::pair<std::string, Tensor>> named(const std::vector<Tensor>& tensors) {
  std::vector<std::pair<std::string, Tensor>> result;
  for (const auto& t : tensors) result.emplace_back(fmt::format("p{}", result.size()), t);
  return result;
}

/// Our options for what transformers calls `lr`, `eps`, ...
io::Json adafactor_section(io::Json theirs) {
  theirs["name"] = "adafactor";
  if (!theirs["lr"].is_null()) theirs["learning_rate"] = theirs["lr"];
  if (theirs.contains("eps")) {
    theirs["eps1"] = theirs["eps"][0];
    theirs["eps2"] = theirs["eps"][1];
  }
  theirs.erase("lr");
  theirs.erase("eps");
  return theirs;
}

}  // namespace

TEST_CASE("Adafactor equals transformers in every setting", "[training][golden]") {
  const auto file = test::golden_file("training.json");
  if (!file) return;
  const auto golden = io::read_json(*file)["adafactor"];
  REQUIRE(golden["cases"].size() == 6);
  int number = 0;
  for (const auto& c : golden["cases"]) {
    INFO(c["options"].dump());
    const auto options = training::OptimizerOptions::read(object_of(adafactor_section(c["options"]).dump()));
    const auto values = tensors_of(golden["start"], golden["shapes"]);
    const auto optimizer = options.make(training::trained_parameters(named(values), options, {}));
    for (const auto& step : golden["gradients"]) {
      const auto gradients = tensors_of(step, golden["shapes"]);
      for (std::size_t i = 0; i < values.size(); ++i) values[i].mutable_grad() = gradients[i];
      optimizer->step(1.0);
    }
    const auto expected = tensors_of(c["final"], golden["shapes"]);
    double largest = 0.0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      test::require_close(fmt::format("tensor {}", i), values[i], expected[i], test::kFloat64);
      largest = std::max(largest, test::compare(values[i], expected[i], test::kFloat64).difference);
    }
    test::log_golden(fmt::format("training/adafactor_{}", ++number), fmt::format("ok, largest error {:.1e}", largest));
  }
}

TEST_CASE("the cosine schedule equals transformers", "[training][golden]") {
  const auto file = test::golden_file("training.json");
  if (!file) return;
  const auto golden = io::read_json(*file);
  REQUIRE(golden["cosine"].size() == 3);
  for (const auto& c : golden["cosine"]) {
    training::Schedule schedule{.kind = training::Schedule::Kind::kCosine, .warmup_steps = c["warmup_steps"]};
    const auto steps = c["steps"].get<std::int64_t>();
    for (std::int64_t step = 0; step <= steps; ++step) {
      CHECK(schedule.factor(step, steps) == Approx(c["factors"][static_cast<std::size_t>(step)].get<double>()).margin(1e-14));
    }
  }
}

TEST_CASE("every optimiser is named, sourced and documented", "[training]") {
  const auto page = io::read_file(std::filesystem::path(MERGEX_SOURCE_DIR) / "docs/finetune.md");
  std::set<std::string> names;
  for (const auto* kind : training::optimizer_registry()) {
    CHECK(names.insert(kind->name).second);
    CHECK(!std::string(kind->summary).empty());
    CHECK(!std::string(kind->paper).empty());
    CHECK(page.find(fmt::format("`{}`", kind->name)) != std::string::npos);
  }
}

TEST_CASE("an optimiser goes on from its saved state, bit for bit", "[training][law]") {
  const std::string section = GENERATE(R"({"name": "adamw", "learning_rate": 0.1, "weight_decay": 0.01})",
                                       R"({"name": "adafactor", "learning_rate": 0.1, "beta1": 0.5})",
                                       R"({"name": "adafactor", "warmup_init": true})");
  const auto options = training::OptimizerOptions::read(object_of(section));
  std::vector<Tensor> values{test::seeded_normal({3, 4}, 1), test::seeded_normal({5}, 2), test::seeded_normal({2}, 3)};
  auto other = values;
  for (auto& t : other) t = t.clone();
  const auto step = [&](training::Optimizer& optimizer, const std::vector<Tensor>& parameters, std::uint64_t number) {
    for (std::size_t i = 0; i < 2; ++i) {  // the third one never has a gradient
      parameters[i].mutable_grad() = test::seeded_normal(parameters[i].sizes(), 10 * number + i);
    }
    optimizer.step(0.5);
  };
  const auto first = options.make(training::trained_parameters(named(values), options, {}));
  for (const std::uint64_t number : {1u, 2u}) step(*first, values, number);
  for (std::size_t i = 0; i < 3; ++i) other[i].copy_(values[i]);
  std::map<std::string, Tensor> state;
  for (const auto& [name, t] : first->state()) state.emplace(name, t.clone());
  const auto second = options.make(training::trained_parameters(named(other), options, {}));
  second->restore(state);
  for (const std::uint64_t number : {3u, 4u}) {
    step(*first, values, number);
    step(*second, other, number);
  }
  for (std::size_t i = 0; i < 3; ++i) CHECK(torch::equal(values[i], other[i]));
  CHECK(torch::equal(values[2], test::seeded_normal({2}, 3)));
}

TEST_CASE("optimiser options: mistakes name their place", "[training]") {
  const auto error = [](const std::string& section) {
    return test::user_error([&] { training::OptimizerOptions::read(object_of(section)); });
  };
  using Catch::Contains;
  CHECK_THAT(error(R"({"name": "adam", "learning_rate": 0.1})"), Contains("did you mean \"adamw\"?"));
  CHECK_THAT(error(R"({"name": "adamw"})"), Contains("\"learning_rate\" is missing"));
  CHECK_THAT(error(R"({"name": "adafactor", "learning_rate": 0.1, "relative_step": true})"), Contains("keep one"));
  CHECK_THAT(error(R"({"name": "adafactor", "relative_step": false})"), Contains("learning_rate is missing"));
  CHECK_THAT(error(R"({"name": "adafactor", "learning_rate": 0.1, "warmup_init": true})"), Contains("only relative_step has"));
  CHECK_THAT(error(R"({"name": "adafactor", "learning_rate": 0.1, "betas": [0.9, 0.9]})"), Contains("unknown key \"betas\""));
  CHECK_THAT(test::user_error([] { test::options_of(R"({"epochs": 1, "optimizer": {"name": "adafactor"}})"); }),
             Contains("r.json#/schedule: adafactor chooses its own learning rate"));
  test::options_of(R"({"epochs": 1, "optimizer": {"name": "adafactor"}, "schedule": {"name": "constant"}})");
}
