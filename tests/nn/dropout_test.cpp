#include <torch/torch.h>

#include "nn/forward_context.h"
#include "support/catch.h"
#include "support/tensors.h"

using namespace mergex;

TEST_CASE("dropout keeps the expectation, scales what is kept, and is the identity at evaluation", "[nn][law]") {
  const double p = GENERATE(0.1, 0.5, 0.9);
  const auto x = torch::ones({37, 41, 53}, at::kDouble);  // no multiple of four entries
  tensor::RandomStreams random(7, at::kCPU);
  nn::ForwardContext training{.training = true, .random = &random};
  const auto y = nn::dropout(x, p, training);
  const auto n = static_cast<double>(x.numel());
  CHECK(std::abs(y.mean().item<double>() - 1.0) < 5.0 * std::sqrt(p / (1 - p) / n));
  const auto values = std::get<0>(torch::_unique(y));
  REQUIRE(values.numel() == 2);
  CHECK(values[0].item<double>() == 0.0);
  CHECK(values[1].item<double>() == Approx(1.0 / (1.0 - p)).epsilon(1e-3));

  // Neighbouring entries share a draw but no bits: their product has the expectation of independent ones.
  const auto flat = y.flatten();
  const auto pairs = (flat.slice(0, 0, -1) * flat.slice(0, 1)).mean().item<double>();
  CHECK(std::abs(pairs - 1.0) < 6.0 * std::sqrt((1 / ((1 - p) * (1 - p)) - 1) * 3.0 / n));

  CHECK(!torch::equal(nn::dropout(x, p, training), y));
  tensor::RandomStreams again(7, at::kCPU);
  nn::ForwardContext repeated{.training = true, .random = &again};
  CHECK(torch::equal(nn::dropout(x, p, repeated), y));
  nn::ForwardContext evaluation;
  CHECK(torch::equal(nn::dropout(x, p, evaluation), x));
  CHECK(nn::dropout(torch::ones({0, 3}), p, training).numel() == 0);
}
