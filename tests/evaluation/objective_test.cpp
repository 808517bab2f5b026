#include "evaluation/objective.h"

#include <torch/torch.h>

#include "evaluation/evaluate.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/tensors.h"
#include "training/toy.h"

using namespace mergex;
using evaluation::TrainingLoss;

TEST_CASE("label smoothing and class weights equal torch's cross entropy", "[evaluation][golden]") {
  const auto file = test::golden_file("training.json");
  if (!file) return;
  const auto golden = io::read_json(*file);
  int number = 0;
  for (const auto& c : golden["cross_entropy"]) {
    const auto rows = c["logits"].get<std::vector<std::vector<double>>>();
    std::vector<Tensor> stacked;
    for (const auto& row : rows) stacked.push_back(torch::tensor(row, at::kDouble));
    const auto logits = torch::stack(stacked).requires_grad_(true);
    const auto labels = c["labels"].get<std::vector<std::int64_t>>();
    TrainingLoss loss{.label_smoothing = c["label_smoothing"]};
    if (!c["class_weights"].is_null()) loss.class_weights = c["class_weights"].get<std::vector<double>>();
    // Sentences, where none is left out, and the tokens of one target.
    for (const bool is_text : {false, true}) {
      const bool has_ignored = std::ranges::find(labels, -100) != labels.end();
      if (is_text ? !loss.class_weights.empty() : has_ignored) continue;
      const evaluation::Objective objective(is_text ? tasks::Kind::kSpanCorruption : tasks::Kind::kClassification,
                                            at::kCPU, 0, loss);
      std::vector<tasks::Encoded> examples;
      std::vector<const tasks::Encoded*> members;
      for (const auto label : labels) examples.push_back({{1}, static_cast<double>(label)});
      for (const auto& example : examples) members.push_back(&example);
      evaluation::Batch batch;
      double units = 0.0;
      if (is_text) {
        batch.inputs.labels_BU = torch::tensor(labels).unsqueeze(0);
        units = static_cast<double>(labels.size() - static_cast<std::size_t>(std::ranges::count(labels, -100)));
      } else {
        batch = objective.batch(members);
        units = objective.training_weight(members);
      }
      const auto mean = objective.training_loss_sum(batch, is_text ? logits.unsqueeze(0) : logits) / units;
      CHECK(mean.item<double>() == Approx(c["mean"].get<double>()).epsilon(1e-12));
      logits.mutable_grad() = Tensor();
      mean.backward();
      std::vector<Tensor> expected;
      for (const auto& row : c["gradient"]) expected.push_back(torch::tensor(row.get<std::vector<double>>(), at::kDouble));
      test::require_close("gradient", logits.grad(), torch::stack(expected), test::kFloat64);
      test::log_golden(fmt::format("training/cross_entropy_{}", ++number), "ok");
    }
  }
  CHECK(number == 5);
}

TEST_CASE("an evaluation's loss is plain, whatever is trained on", "[evaluation]") {
  const evaluation::Objective plain(tasks::Kind::kClassification, at::kCPU, 0);
  const evaluation::Objective shaped(tasks::Kind::kClassification, at::kCPU, 0,
                                     {.label_smoothing = 0.1, .class_weights = {1.0, 5.0}});
  const tasks::Encoded example{{1}, 1.0};
  const auto batch = plain.batch(std::vector{&example});
  const auto logits = test::seeded_normal({1, 2}, 1);
  CHECK(torch::equal(plain.loss_sum(batch, logits), shaped.loss_sum(batch, logits)));
  CHECK(!torch::equal(plain.training_loss_sum(batch, logits), shaped.training_loss_sum(batch, logits)));
  CHECK(torch::equal(plain.training_loss_sum(batch, logits), plain.loss_sum(batch, logits)));
}

TEST_CASE("balanced weights give each class the same share", "[evaluation][law]") {
  const std::vector<tasks::Encoded> examples{{{1}, 0.0}, {{1}, 2.0}, {{1}, 0.0}, {{1}, 1.0}, {{1}, std::nullopt}};
  const std::vector<std::string> labels{"a", "b", "c"};
  CHECK(evaluation::balanced_weights(examples, labels, "here") == std::vector{4.0 / 6.0, 4.0 / 3.0, 4.0 / 3.0});
  const std::vector<std::string> more{"a", "b", "c", "d"};
  CHECK_THAT(test::user_error([&] { evaluation::balanced_weights(examples, more, "here"); }),
             Catch::Contains("here: got \"balanced\", but class \"d\" has no training example"));
  const auto read = [](const std::string& text) {
    auto section = test::object_of(text);
    return TrainingLoss::read(section);
  };
  CHECK(read(R"({"class_weights": "balanced"})").balanced);
  CHECK(read(R"({"class_weights": [1, 2.5]})").class_weights == std::vector{1.0, 2.5});
  CHECK_THAT(test::user_error([&] { read(R"({"class_weights": "equal"})"); }), Catch::Contains("expected \"balanced\""));
  CHECK_THAT(test::user_error([&] { read(R"({"class_weights": [1, 0]})"); }), Catch::Contains("more than 0"));
}

TEST_CASE("the order of batches changes no prediction and leaves them in the order of the data", "[evaluation][law]") {
  test::TemporaryFolder folder;
  test::Toy toy(folder.path(), {});
  const std::vector<std::string> metrics{"accuracy"}, labels{"a", "b", "c"};
  const auto evaluate = [&](bool by_length) {
    return evaluation::evaluate_split(*toy.model, toy.objective, tasks::Kind::kClassification, "validation",
                                      toy.examples, evaluation::batch_order(toy.examples, by_length), metrics, labels, 3);
  };
  const auto plain = evaluate(false), sorted = evaluate(true);
  CHECK(sorted.loss == Approx(plain.loss).epsilon(1e-12));
  CHECK(sorted.value("accuracy") == plain.value("accuracy"));
  REQUIRE(sorted.predictions.size() == plain.predictions.size());
  for (std::size_t i = 0; i < plain.predictions.size(); ++i) {
    CHECK(sorted.predictions[i].gold == plain.predictions[i].gold);
    for (std::size_t c = 0; c < 3; ++c) {
      CHECK(sorted.predictions[i].logits[c] == Approx(plain.predictions[i].logits[c]).margin(1e-6));
    }
  }
  const auto order = evaluation::batch_order(toy.examples, true);
  for (std::size_t i = 1; i < order.size(); ++i) {
    CHECK(toy.examples[order[i]].ids.size() <= toy.examples[order[i - 1]].ids.size());
  }
}
