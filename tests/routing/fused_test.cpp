#include <catch2/catch.hpp>
#include <torch/torch.h>

#include "routing/curvature.h"
#include "routing/fused_curvature.h"
#include "routing/merged_linear.h"
#include "routing/tiled_product.h"

// Each fast path against the plain one, at odd sizes and at those of T5-small.
namespace mergex::routing {
namespace {

double largest_difference(const Tensor& a, const Tensor& b) {
  const auto scale = std::max(b.abs().max().item<double>(), 1e-2);
  return (a - b).abs().max().item<double>() / scale;
}

struct CurvatureCase {
  Tensor experts, base, before, after, c[4];

  CurvatureCase(std::int64_t rank, std::int64_t n, std::int64_t o, std::int64_t i, bool masked, at::ScalarType dtype) {
    torch::manual_seed(3);
    const auto options = at::TensorOptions(dtype);
    const auto [a1, a2] = factor_pair(o);
    const auto [b1, b2] = factor_pair(i);
    experts = torch::randn({n, o, i}, options);
    base = torch::randn({o, i}, options);
    if (masked) {
      before = torch::rand({n, o, i}) < 0.7;
      after = torch::rand({n, o, i}) < 0.8;
    }
    const std::int64_t widths[] = {a1, a2, b1, b2};
    for (int f = 0; f < 4; ++f) {
      c[f] = torch::randn({rank, n, widths[f], widths[f]}, options) / std::sqrt(static_cast<double>(widths[f]));
    }
  }
  std::vector<Tensor> leaves() {
    std::vector<Tensor> all{experts, base, c[0], c[1], c[2], c[3]};
    for (auto& t : all) t = t.detach().clone().requires_grad_(true);
    return all;
  }
  Tensor fused(const std::vector<Tensor>& p) const {
    return fused_curvature(p[0], p[1], {.before_NOI = before, .after_NOI = after}, 0.9, p[2], p[3], p[4], p[5]);
  }
  Tensor plain(const std::vector<Tensor>& p) const {
    auto tau = 0.9 * (p[0] - p[1]);
    if (before.defined()) tau = tau * before;
    auto gamma = apply_curvature(tau, p[2], p[3], p[4], p[5]);
    return after.defined() ? gamma * after : gamma;
  }
};

}  // namespace

TEST_CASE("gradients of the fused curvature equal central differences", "[routing][law]") {
  for (const bool masked : {false, true}) {
    for (const std::int64_t rank : {1, 3}) {
      CurvatureCase test(rank, 2, 6, 10, masked, at::kDouble);
      auto p = test.leaves();
      const auto g = torch::randn({2, 6, 10}, at::kDouble);
      (test.fused(p) * g).sum().backward();
      const torch::NoGradGuard no_grad;
      constexpr double kStep = 1e-6;
      for (std::size_t which = 0; which < p.size(); ++which) {
        auto flat = p[which].view(-1);
        for (std::int64_t e = 0; e < flat.size(0); e += 3) {
          const auto value = flat[e].item<double>();
          const auto loss_at = [&](double v) {
            flat[e] = v;
            return (test.fused(p) * g).sum().item<double>();
          };
          const auto slope = (loss_at(value + kStep) - loss_at(value - kStep)) / (2.0 * kStep);
          flat[e] = value;
          INFO("tensor " << which << " entry " << e);
          REQUIRE(p[which].grad().view(-1)[e].item<double>() == Approx(slope).epsilon(1e-6).margin(1e-8));
        }
      }
    }
  }
}

TEST_CASE("the fused curvature equals plain contraction", "[routing][law]") {
  const auto check = [](CurvatureCase test, double tolerance) {
    auto a = test.leaves(), b = test.leaves();
    const auto left = test.fused(a), right = test.plain(b);
    CHECK(largest_difference(left, right) < tolerance);
    const auto g = torch::randn_like(left);
    (left * g).sum().backward();
    (right * g).sum().backward();
    for (std::size_t i = 0; i < a.size(); ++i) {
      INFO("gradient " << i);
      CHECK(largest_difference(a[i].grad(), b[i].grad()) < tolerance);
    }
  };
  for (const bool masked : {false, true}) {
    check(CurvatureCase(2, 3, 7, 12, masked, at::kDouble), 1e-12);
    check(CurvatureCase(1, 2, 24, 18, masked, at::kDouble), 1e-12);
    check(CurvatureCase(3, 2, 13, 11, masked, at::kFloat), 2e-5);
  }
  check(CurvatureCase(1, 2, 2048, 512, true, at::kFloat), 2e-5);
  check(CurvatureCase(2, 1, 512, 2048, true, at::kFloat), 2e-5);
}

TEST_CASE("products in tiles equal merging first and multiplying then", "[routing][law]") {
  const auto check = [](std::int64_t b, std::int64_t t, std::int64_t n, std::int64_t o, std::int64_t i, bool has_base,
                        at::ScalarType dtype, double tolerance) {
    INFO(b << " sentences of " << t << ", " << n << " terms [" << o << ", " << i << "]");
    torch::manual_seed(5);
    const auto options = at::TensorOptions(dtype);
    const auto x = torch::randn({b, t, i}, options), terms = torch::randn({n, o, i}, options);
    const auto base = has_base ? torch::randn({o, i}, options) : Tensor();
    const auto scores = torch::softmax(torch::randn({b, n}, options), 1), dy = torch::randn({b, t, o}, options);
    const auto run = [&](bool tiled, bool twice) {
      std::vector<Tensor> leaves;
      const auto leaf = [&](const Tensor& value) {
        if (!value.defined()) return value;
        leaves.push_back(value.clone().requires_grad_(true));
        return leaves.back();
      };
      const auto x_ = leaf(x), terms_ = leaf(terms), scores_ = leaf(scores), base_ = leaf(base);
      const Mixture mixture{terms_, base_};
      Tensor y;
      for (int pass = 0; pass < (twice ? 2 : 1); ++pass) {  // gradients of micro-batches add up
        y = tiled ? tiled_product(x_, terms_, base_, scores_)
                  : torch::bmm(x_, merge_weights(mixture, scores_).transpose(1, 2));
        (y * dy).sum().backward();
      }
      std::vector<Tensor> result{y.detach()};
      for (const auto& l : leaves) result.push_back(l.grad());
      return result;
    };
    for (const bool twice : {false, true}) {
      const auto left = run(true, twice), right = run(false, twice);
      for (std::size_t k = 0; k < left.size(); ++k) {
        INFO("tensor " << k);
        CHECK(largest_difference(left[k], right[k]) < tolerance);
      }
    }
    // Inside a graph, where the terms are no leaf, their gradient goes on.
    const auto source = terms.clone().requires_grad_(true);
    (tiled_product(x, 2.0 * source, base, scores) * dy).sum().backward();
    CHECK(largest_difference(source.grad(), 2.0 * run(false, false)[2]) < tolerance);
  };
  for (const bool has_base : {false, true}) {
    check(3, 5, 2, 7, 11, has_base, at::kDouble, 1e-12);
    check(5, 1, 4, 33, 520, has_base, at::kDouble, 1e-12);
    check(2, 23, 7, 2048, 512, has_base, at::kFloat, 2e-5);
    check(2, 23, 7, 512, 2048, has_base, at::kFloat, 2e-5);
  }
}

}  // namespace mergex::routing
