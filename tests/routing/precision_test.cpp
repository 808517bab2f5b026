#include <torch/torch.h>

#include "routing/method.h"
#include "support/catch.h"
#include "support/tensors.h"
#include "tensor/autocast.h"
#include "training/toy.h"

using namespace mergex;

namespace {

struct Pass {
  Tensor y, balance_loss;
  std::vector<std::pair<std::string, Tensor>> gradients;
};

/// One training pass of an expert layer over float32 features.
Pass run(const std::string& section, at::ScalarType precision, at::ScalarType features) {
  const auto options = routing::ExpertOptions::read(test::object_of(section));
  const auto layer = options.make_layer({test::seeded_normal({6, 8}, 1, at::kFloat)});
  auto generator = tensor::cpu_generator(2, "experts");
  layer->initialize(generator);
  {
    const torch::NoGradGuard no_grad;
    for (auto& item : layer->named_parameters()) {
      item.value().add_(0.1 * test::seeded_normal(item.value().sizes(), 3, at::kFloat));
    }
  }
  tensor::RandomStreams random(4, at::kCPU);
  nn::ForwardContext context{.training = true, .random = &random};
  Pass pass;
  {
    const tensor::Autocast autocast(at::kCPU, precision);
    layer->begin(true, &random);
    pass.y = layer->forward(test::seeded_normal({3, 5, 8}, 5, at::kFloat).to(features), context);
  }
  pass.balance_loss = context.auxiliary_losses.at(0);
  (pass.y.to(at::kFloat).square().sum() + pass.balance_loss).backward();
  std::vector<Tensor> roots, gradients;
  layer->collect_backward(roots, gradients);
  if (!roots.empty()) torch::autograd::backward(roots, gradients);
  for (auto& item : layer->named_parameters()) pass.gradients.emplace_back(item.key(), item.value().grad());
  return pass;
}

}  // namespace

TEST_CASE("routing, masks, curvature and merges keep float32 in mixed precision", "[routing][law]") {
  const std::string section = GENERATE(
      R"({"method": "camex", "num_experts": 3, "protocol": "ties", "auxiliary_loss": 0.1, "curvature": {"rank": 2}})",
      R"({"method": "camex", "num_experts": 3, "protocol": "dare", "auxiliary_loss": 0.1})",
      R"({"method": "smoe", "num_experts": 3, "auxiliary_loss": 0.1})");
  INFO(section);
  const auto wide = run(section, at::kFloat, at::kFloat), mixed = run(section, at::kBFloat16, at::kFloat);
  CHECK(mixed.balance_loss.scalar_type() == at::kFloat);
  CHECK(torch::equal(mixed.balance_loss, wide.balance_loss));  // the router saw and did the same
  CHECK(!torch::equal(mixed.y.to(at::kFloat), wide.y));        // the product itself was in bfloat16
  // 8 bits of mantissa, against the size of the largest entry.
  test::require_gradient("output", mixed.y, wide.y, 0.02, 0.0);
  for (std::size_t i = 0; i < wide.gradients.size(); ++i) {
    CHECK(mixed.gradients[i].second.scalar_type() == at::kFloat);
    test::require_gradient(wide.gradients[i].first, mixed.gradients[i].second, wide.gradients[i].second, 0.05, 1e-6);
  }
  // Features that come in bfloat16 are widened before they are pooled.
  const auto narrow = run(section, at::kBFloat16, at::kBFloat16);
  CHECK(narrow.balance_loss.scalar_type() == at::kFloat);
  CHECK(narrow.balance_loss.item<float>() == Approx(wide.balance_loss.item<float>()).epsilon(0.02));
}
