#include "nn/recompute.h"

#include <torch/torch.h>

#include "support/catch.h"
#include "support/tensors.h"

using namespace mergex;

namespace {

struct Result {
  Tensor y, auxiliary, weight_gradient, leaf_gradient, x_gradient;
  std::map<std::string, Tensor> streams;
};

/// Two parts in turn over one weight and one leaf that they capture, with dropout and a balance loss.
Result run(bool recomputes, bool x_has_gradient) {
  tensor::RandomStreams random(5, at::kCPU);
  const auto weight = test::seeded_normal({4, 4}, 1).requires_grad_(true);
  const auto leaf = test::seeded_normal({4}, 2).requires_grad_(true);
  const auto x = test::seeded_normal({3, 4}, 3).requires_grad_(x_has_gradient);
  const nn::Part part = [&](std::span<const Tensor> in, nn::ForwardContext& context) {
    const auto h = nn::dropout(torch::matmul(in[0], weight) * leaf, 0.3, context);
    context.auxiliary_losses.push_back(h.square().mean());
    return in[1] + torch::tanh(h);
  };
  nn::ForwardContext context{.training = true, .random = &random};
  Tensor y = x;
  for (int i = 0; i < 2; ++i) {
    const std::vector<Tensor> inputs{y, x};
    y = recomputes ? nn::recomputed(part, inputs, context) : part(inputs, context);
  }
  auto loss = y.square().sum();
  CHECK(context.auxiliary_losses.size() == 2);
  for (const auto& auxiliary : context.auxiliary_losses) loss = loss + 0.5 * auxiliary;
  loss.backward();
  return {y, context.auxiliary_losses[1], weight.grad(), leaf.grad(), x.grad(), random.states()};
}

}  // namespace

TEST_CASE("recomputation gives the same output, gradients and random numbers, bit for bit", "[nn][law]") {
  const bool x_has_gradient = GENERATE(true, false);
  const auto kept = run(false, x_has_gradient), recomputed = run(true, x_has_gradient);
  CHECK(torch::equal(kept.y, recomputed.y));
  CHECK(torch::equal(kept.auxiliary, recomputed.auxiliary));
  CHECK(torch::equal(kept.weight_gradient, recomputed.weight_gradient));
  CHECK(torch::equal(kept.leaf_gradient, recomputed.leaf_gradient));
  // It flows into both parts, twice into one: its gradients meet part by part when recomputed, one by one otherwise.
  if (x_has_gradient) test::require_close("x", recomputed.x_gradient, kept.x_gradient, test::kFloat64);
  REQUIRE(kept.streams.size() == recomputed.streams.size());
  for (const auto& [name, state] : kept.streams) CHECK(torch::equal(state, recomputed.streams.at(name)));
}

TEST_CASE("recomputation keeps nothing of a part but its output", "[nn][law]") {
  Tensor hidden;
  const auto weight = test::seeded_normal({4, 4}, 1).requires_grad_(true);
  int runs = 0;
  const nn::Part part = [&](std::span<const Tensor> in, nn::ForwardContext&) {
    ++runs;
    hidden = torch::tanh(torch::matmul(in[0], weight));
    return hidden.square();
  };
  nn::ForwardContext context;
  const auto y = nn::recomputed(part, {test::seeded_normal({3, 4}, 2)}, context);
  CHECK(hidden.use_count() == 1);  // no graph holds it
  y.sum().backward();
  CHECK(runs == 2);
}
