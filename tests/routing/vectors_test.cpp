#include <torch/torch.h>

#include "routing/merged_linear.h"
#include "routing/ties.h"
#include "support/catch.h"
#include "support/tensors.h"

// Golden vectors of the method's specification: worked by hand-made fills in float64, independent of this code.

using namespace mergex;
using namespace mergex::routing;

namespace {

/// Entry k of a tensor with seed q: (((37 k + 11 q + 5) mod 101) - 50) / 50.
Tensor fill(at::IntArrayRef sizes, std::int64_t q) {
  std::int64_t count = 1;
  for (const auto s : sizes) count *= s;
  const auto k = torch::arange(count, at::kLong);
  return (torch::remainder(37 * k + 11 * q + 5, 101) - 50).to(at::kDouble).div(50.0).view(sizes);
}

struct Setup {
  Tensor base = fill({6, 4}, 1), experts = fill({2, 6, 4}, 2), g = fill({6, 4}, 7);
  Tensor scores = torch::tensor({{0.3, 0.7}}, at::kDouble);
  Curvature curvature{1, 2, 6, 4, at::kDouble};
  double alpha = 0.9;

  Setup() {
    const auto factor = [](std::int64_t w, std::int64_t q) {
      return (torch::eye(w, at::kDouble) + 0.1 * fill({2, w, w}, q)).unsqueeze(0).set_requires_grad(true);
    };
    curvature.c1_out = factor(2, 3);
    curvature.c2_out = factor(3, 4);
    curvature.c1_in = factor(2, 5);
    curvature.c2_in = factor(2, 6);
    for (auto* t : {&base, &experts, &scores}) t->set_requires_grad(true);
  }
  Tensor mask() const { return ties_mask((experts - base).detach(), 1.0); }
  Tensor merged(bool ties, bool curved) {
    return merge_weights(make_mixture(base, experts, ties ? mask() : Tensor(), curved ? &curvature : nullptr, alpha,
                                      Form::kAutomatic),
                         scores)[0];
  }
};

void check_sums(const Tensor& t, double sum, double squares, double first) {
  CHECK(t.sum().item<double>() == Approx(sum).margin(1e-11));
  CHECK(t.square().sum().item<double>() == Approx(squares).margin(1e-11));
  CHECK(t.flatten()[0].item<double>() == Approx(first).margin(1e-11));
}

}  // namespace

TEST_CASE("golden vectors G1 and G2: merged weights", "[routing][golden]") {
  Setup s;
  CHECK(s.base[0][2].item<double>() == Approx(0.80));
  CHECK(s.mask().flatten(1).sum(1)[0].item<double>() == 24);
  CHECK(s.mask().flatten(1).sum(1)[1].item<double>() == 5);
  struct Row {
    bool ties, curved;
    double sum, squares, first, last;
  };
  for (const auto& row : {Row{false, false, -0.629400000000, 4.585203640000, -0.746600000000, 0.113400000000},
                          Row{false, true, -0.727839866598, 4.494862087805, -0.758432530756, 0.075187488312},
                          Row{true, false, 1.764600000000, 4.361326840000, -0.620600000000, 0.239400000000},
                          Row{true, true, 1.750488892774, 4.314246507415, -0.650335697374, 0.233673586835}}) {
    const auto merged = s.merged(row.ties, row.curved);
    check_sums(merged, row.sum, row.squares, row.first);
    CHECK(merged[5][3].item<double>() == Approx(row.last).margin(1e-11));
  }
  // The released order, mask last, is another operator.
  const auto last = merge_weights(make_mixture(s.base, s.experts, s.mask(), &s.curvature, s.alpha, Form::kAutomatic,
                                               MaskOrder::kAfterCurvature),
                                  s.scores)[0];
  check_sums(last, 1.565947692254, 4.221316792453, -0.660471655871);
  CHECK(last[5][3].item<double>() == Approx(0.234545873160).margin(1e-11));
}

TEST_CASE("golden vector G3: gradients of TIES with curvature, mask first", "[routing][golden]") {
  Setup s;
  (s.merged(true, true) * s.g).sum().backward();
  check_sums(s.base.grad(), -1.095398491170, 3.830059612652, 0.442372737230);
  check_sums(s.experts.grad(), 0.515398491170, 0.880463503379, 0.197627262770);
  check_sums(s.curvature.c1_out.grad(), -0.442793041880, 1.222329903887, -0.322011787728);
  check_sums(s.curvature.c2_out.grad(), 1.374576791126, 3.326544925096, -0.098318559559);
  check_sums(s.curvature.c1_in.grad(), 0.224168811894, 1.428113417410, -0.479249894888);
  check_sums(s.curvature.c2_in.grad(), -1.154370749026, 5.680621140848, -0.030355317197);
  CHECK(s.scores.grad()[0][0].item<double>() == Approx(-1.553475109593).margin(1e-11));
  CHECK(s.scores.grad()[0][1].item<double>() == Approx(1.073240507686).margin(1e-11));
}
