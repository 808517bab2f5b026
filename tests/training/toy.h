#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "backbones/backbone.h"
#include "evaluation/objective.h"
#include "routing/method.h"
#include "training/trainer.h"

namespace mergex::test {

/// A JSON object as the sections of a recipe are given, from "r.json".
io::JsonObject object_of(const std::string& text);

/// The `training` and `evaluation` sections; by default without evaluations between the first and the last step.
training::TrainingOptions options_of(const std::string& training, const std::string& evaluation = R"({"every": 1000})");

struct ToyOptions {
  tasks::Kind kind = tasks::Kind::kClassification;
  std::string experts = "";  ///< an `experts` section; empty: dense
  at::ScalarType dtype = at::kDouble;
  double dropout = 0.0;
  std::int64_t num_layers = 1;
  evaluation::TrainingLoss loss = {};
};

/// A small T5 on 16 made-up sentences of ragged lengths, with all that the training loop wants.
struct Toy {
  Toy(const std::filesystem::path& folder, const ToyOptions& options);

  std::vector<Tensor> weights() const;
  const Tensor& parameter(const std::string& name) const;

  std::shared_ptr<backbones::Backbone> model;
  routing::ExpertSet experts;
  std::vector<tasks::Encoded> examples;
  evaluation::Objective objective;
  tensor::RandomStreams random{1, at::kCPU};
  training::Run run;
  std::vector<double> evaluations;  ///< what evaluate() will answer, in turn; else 0, 1, ...
  std::filesystem::path read_from;

 private:
  std::size_t num_evaluated_ = 0;
};

}  // namespace mergex::test
