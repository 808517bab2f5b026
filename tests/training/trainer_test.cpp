#include "training/trainer.h"

#include <torch/torch.h>

#include <fstream>

#include "backbones/t5.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "evaluation/objective.h"
#include "routing/method.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/tensors.h"

using namespace mergex;
namespace fs = std::filesystem;

namespace {

io::JsonObject object_of(const std::string& text) {
  auto document = std::make_shared<io::JsonDocument>();
  document->value = io::parse_json(text, "r.json");
  document->file = "r.json";
  return io::JsonObject(document);
}

/// A small classifier in float64 on made-up sentences of ragged lengths, without dropout.
struct Toy {
  std::shared_ptr<backbones::Backbone> model;
  routing::ExpertSet experts;
  std::vector<tasks::Encoded> examples;
  evaluation::Objective objective;
  tensor::RandomStreams random{1, at::kCPU};
  training::Run run;
  std::vector<double> evaluations;  // what evaluate() will answer, in turn; else minus the loss

  Toy(const fs::path& folder, tasks::Kind kind, const std::string& method = "")
      : objective(kind, at::kCPU, 0) {
    const io::Json config{{"model_type", "t5"}, {"vocab_size", 40}, {"d_model", 8}, {"d_kv", 4},
                          {"d_ff", 12}, {"num_layers", 1}, {"num_heads", 2}, {"dropout_rate", 0.0}};
    backbones::BuildOptions build;
    build.tensors = at::TensorOptions(at::kDouble);
    build.num_labels = kind == tasks::Kind::kRegression ? 1 : 3;
    build.head = kind == tasks::Kind::kSpanCorruption ? backbones::Head::kLanguageModel : backbones::Head::kClassification;
    model = backbones::build(config, "toy", build);
    auto generator = tensor::cpu_generator(1, "weights");
    model->initialize(generator, std::nullopt);
    if (!method.empty()) {
      experts = routing::upcycle(model->feed_forwards(), routing::ExpertOptions::read(object_of(method)), generator);
    }
    for (int i = 0; i < 16; ++i) {
      tasks::Encoded e;
      for (int t = 0; t <= (i * 5) % 7; ++t) e.ids.push_back(2 + (i * 7 + t * 3) % 38);
      e.ids.push_back(1);
      e.label = kind == tasks::Kind::kRegression ? 0.5 * i : i % 3;
      examples.push_back(e);
    }
    run.folder = folder;
    run.num_examples = 16;
    run.seed = 3;
    for (const auto& item : model->named_parameters()) run.parameters.emplace_back(item.key(), item.value());
    run.experts = experts.empty() ? nullptr : &experts;
    run.random = &random;
    const auto batch = [this, kind](std::span<const std::size_t> members) {
      if (kind == tasks::Kind::kSpanCorruption) {
        std::vector<std::vector<std::int32_t>> inputs, targets;
        for (const auto i : members) {
          inputs.push_back(examples[i].ids);
          targets.push_back({examples[i].ids.rbegin(), examples[i].ids.rend()});
        }
        return objective.batch(inputs, targets);
      }
      std::vector<const tasks::Encoded*> rows;
      for (const auto i : members) rows.push_back(&examples[i]);
      return objective.batch(rows);
    };
    run.count_units = [batch](std::span<const std::size_t> members, std::int64_t) { return batch(members).num_units; };
    run.loss_sum = [this, batch](std::span<const std::size_t> members, std::int64_t, nn::ForwardContext& context) {
      const auto b = batch(members);
      return objective.loss_sum(b, model->forward(b.inputs, context));
    };
    run.evaluate = [this] {
      double value = static_cast<double>(evaluated_++);
      if (!evaluations.empty()) value = evaluations.at(static_cast<std::size_t>(evaluated_ - 1));
      return training::Evaluation{{{"value", value}}, value};
    };
    run.write_model = [this](const fs::path& to) {
      std::ofstream out(to / "weights");
      for (const auto& [name, p] : run.parameters) out << fmt::format("{:.17g}\n", p.sum().item<double>());
    };
    run.read_model = [this](const fs::path& from) { read_from = from; };
  }

  std::vector<Tensor> weights() const {
    std::vector<Tensor> result;
    for (const auto& [name, p] : run.parameters) result.push_back(p.detach().clone());
    return result;
  }

  fs::path read_from;

 private:
  int evaluated_ = 0;
};

training::TrainingOptions options_of(const std::string& training, const std::string& evaluation = R"({"every": 1000})") {
  return training::TrainingOptions::read(object_of(training), object_of(evaluation));
}

}  // namespace

TEST_CASE("E3 accumulation equals the large batch with ragged lengths", "[training][law]") {
  const auto kind = GENERATE(tasks::Kind::kClassification, tasks::Kind::kRegression, tasks::Kind::kSpanCorruption);
  // Noise and balance losses off: at k = n the naive router draws noise, so experts are compared without.
  std::vector<std::vector<Tensor>> results;
  for (const auto& [batch, accumulation] : {std::pair{8, 1}, std::pair{4, 2}, std::pair{1, 8}}) {
    test::TemporaryFolder folder;
    Toy toy(folder.path(), kind);
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
  Toy toy(folder.path(), tasks::Kind::kClassification);
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
  Toy toy(folder.path(), tasks::Kind::kClassification);
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
  Toy toy(folder.path(), tasks::Kind::kClassification, R"({"method": "camex", "num_experts": 2, "protocol": "ties"})");
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
