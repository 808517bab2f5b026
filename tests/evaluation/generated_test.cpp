#include <torch/torch.h>

#include "evaluation/evaluate.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/sentencepiece_bytes.h"

using namespace mergex;

namespace {

/// Writes the given answers, whatever it reads; every token of a gold answer costs ln 2.
struct Parrot : backbones::Backbone {
  std::vector<std::vector<std::int32_t>> answers;
  std::size_t next = 0;
  std::int64_t longest_asked_for = 0;

  Tensor forward(const backbones::Inputs& inputs, nn::ForwardContext&) override {
    const auto vocab = torch::zeros({inputs.labels_BU.size(0), inputs.labels_BU.size(1), 142});
    const auto target = inputs.labels_BU.clamp_min(0).unsqueeze(2);
    // One logit as large as all the others together: a probability of one half.
    return vocab.scatter(2, target, std::log(141.0));
  }
  Tensor generate(const Tensor& input_ids_BT, const Tensor&, std::int64_t max_new_tokens, std::optional<std::int64_t> eos,
                  nn::ForwardContext&) override {
    longest_asked_for = max_new_tokens;
    auto ids = torch::zeros({input_ids_BT.size(0), 1 + max_new_tokens}, at::kLong);
    for (std::int64_t b = 0; b < ids.size(0); ++b) {
      const auto& answer = answers.at(next++);
      for (std::size_t i = 0; i < answer.size() && i < static_cast<std::size_t>(max_new_tokens); ++i) {
        ids[b][static_cast<std::int64_t>(i) + 1] = answer[i];
      }
      if (std::ssize(answer) < max_new_tokens) ids[b][std::ssize(answer) + 1] = *eos;
    }
    return ids;
  }
  std::vector<nn::FeedForwardSite> feed_forwards() override { return {}; }
  std::int64_t vocab_size() const override { return 142; }
  void reorder_labels(std::span<const std::int64_t>) override {}
  void initialize(at::Generator&, std::optional<std::span<const std::string>>) override {}
  std::string file_name(const std::string& parameter) const override { return parameter; }
  bool is_ignored(const std::string&) const override { return false; }
  bool is_head(const std::string&) const override { return false; }
  io::Json config() const override { return {}; }
};

evaluation::SplitResult evaluate(tasks::Kind kind, const std::vector<std::string>& labels,
                                 const std::vector<std::string>& metrics,
                                 const std::vector<std::pair<std::optional<double>, std::string>>& gold_and_answer) {
  const test::TemporaryFolder folder;
  auto model = test::specials_message() + test::piece_message("\u2581", -1.0f);
  for (const char c : std::string_view("abcdefghijklmnopqrstuvwxyz_0123456789.")) {
    model += test::piece_message(std::string(1, c), -2.0f);
  }
  const auto tokenizer = text::T5Tokenizer::load(test::write_text(folder / "spiece.model", model));
  Parrot parrot;
  std::vector<tasks::Encoded> examples;
  for (const auto& [gold, answer] : gold_and_answer) {
    parrot.answers.push_back(tokenizer.encode(answer));
    tasks::Encoded example{.ids = {5, 1}, .label = gold};
    if (gold) example.target_ids = {7, 8, 1};
    examples.push_back(example);
  }
  const evaluation::Objective objective(kind, at::kCPU, tokenizer.pad_id());
  auto result = evaluation::evaluate_generated(parrot, objective, kind, "validation", examples, metrics, labels, 4, tokenizer);
  std::size_t longest = 0;
  for (const auto& label : labels) longest = std::max(longest, tokenizer.encode(label).size() + 1);
  if (!labels.empty()) CHECK(parrot.longest_asked_for == static_cast<std::int64_t>(longest));
  return result;
}

}  // namespace

TEST_CASE("generated classes: what names none is wrong, and the wrong one of two for f1", "[evaluation]") {
  const std::vector<std::string> labels{"not_equivalent", "equivalent"};
  const auto result = evaluate(tasks::Kind::kClassification, labels, {"accuracy", "f1"},
                               {{1.0, "equivalent"}, {1.0, "not_equivalent"}, {0.0, "equiv"}, {0.0, "not_equivalent"},
                                {1.0, ""}, {0.0, "equivalent"}, {std::nullopt, "no label, no score"}});
  CHECK(result.num_scored == 6);
  CHECK(result.unparsable == 2);
  CHECK(result.value("accuracy") == Approx(2.0 / 6.0));
  // Right of class 1: one. "equiv" counts as class 1, "" as class 0: three predicted, three there. (f1 alone: 0.4)
  CHECK(result.value("f1") == Approx(2.0 * 1 / (3 + 3)));
  CHECK(result.loss == Approx(std::log(2.0)));
  CHECK(result.predictions.size() == 7);
  CHECK(result.predictions[2].text == "equiv");
  CHECK_FALSE(result.predictions[2].is_parsable);
  CHECK(result.predictions[5].predicted == 1.0);
  CHECK(result.to_json()["unparsable"] == 2);
}

TEST_CASE("generated scores: what is no number is -1", "[evaluation]") {
  const auto result = evaluate(tasks::Kind::kRegression, {}, {"pearson"},
                               {{1.0, "1.0"}, {2.0, "2.0"}, {3.0, "good"}, {4.0, "4.0"}});
  CHECK(result.unparsable == 1);
  CHECK(result.predictions[2].predicted == -1.0);
  // numpy: corrcoef([1, 2, 3, 4], [1, 2, -1, 4])
  CHECK(result.value("pearson") == Approx(0.37210420376762543));
}
