#include <torch/torch.h>

#include "backbones/t5.h"
#include "routing/dare.h"
#include "routing/merged_linear.h"
#include "routing/method.h"
#include "routing/noisy_top_k.h"
#include "routing/smoe_linear.h"
#include "routing/ties.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/tensors.h"

// Laws of in-layer merging, numbered as in the method's specification. Everything in float64.

using namespace mergex;
using namespace mergex::routing;
using test::require_close;
using test::seeded_normal;

namespace {

constexpr test::Tolerance kLaw{1e-10, 1e-12};

/// 0, or the scale where an entry is kept.
Tensor values(const EntryMask& mask) { return mask.keep_NOI.to(at::kDouble) * mask.scale; }

struct Layer {
  std::int64_t n, o, i, u;
  Tensor base, experts, scores, g;
  Curvature curvature;
  MaskOrder order = MaskOrder::kBeforeCurvature;

  Layer(std::int64_t n_, std::int64_t o_, std::int64_t i_, std::int64_t rank, std::uint64_t seed, std::int64_t u_ = 3)
      : n(n_), o(o_), i(i_), u(u_),
        base(seeded_normal({o, i}, seed)),
        experts(seeded_normal({n, o, i}, seed + 1)),
        scores(torch::softmax(seeded_normal({u, n}, seed + 2), -1)),
        g(seeded_normal({u, o, i}, seed + 3)),
        curvature(rank, n, o, i, at::kDouble) {
    const torch::NoGradGuard no_grad;
    std::uint64_t q = seed + 4;
    for (auto* f : {&curvature.c1_out, &curvature.c2_out, &curvature.c1_in, &curvature.c2_in}) {
      f->copy_(torch::eye(f->size(-1), at::kDouble) + 0.3 * seeded_normal(f->sizes(), q++));
    }
  }
  Tensor tau() const { return experts - base; }
  Tensor merge(double alpha, const Tensor& mask = {}, bool curved = true, Form form = Form::kBase) const {
    return merge_weights(make_mixture(base, experts, mask, curved ? &curvature : nullptr, alpha, form, order), scores);
  }
  /// Curved and masked task vectors, by the definition.
  Tensor gamma(const Tensor& mask) const {
    if (!mask.defined()) return curvature.forward(tau());
    return order == MaskOrder::kBeforeCurvature ? curvature.forward(mask * tau()) : mask * curvature.forward(tau());
  }
  /// The full operator of expert e: [O*I, O*I].
  Tensor matrix(std::int64_t e) const {
    Tensor sum;
    for (std::int64_t r = 0; r < curvature.c1_out.size(0); ++r) {
      const auto m = torch::kron(torch::kron(curvature.c1_out[r][e], curvature.c2_out[r][e]),
                                 torch::kron(curvature.c1_in[r][e], curvature.c2_in[r][e]));
      sum = sum.defined() ? sum + m : m;
    }
    return sum.detach();
  }
  Tensor curved_by_matrix(const Tensor& t) const {
    std::vector<Tensor> parts;
    for (std::int64_t e = 0; e < n; ++e) parts.push_back(torch::mv(matrix(e), t[e].flatten()).view({o, i}));
    return torch::stack(parts);
  }
};

Layer generated() {
  const auto seed = GENERATE(1u, 2u, 3u);
  const auto [n, o, i, rank] = GENERATE(table<std::int64_t, std::int64_t, std::int64_t, std::int64_t>(
      {{3, 6, 4, 1}, {1, 4, 9, 2}, {2, 7, 1, 3}, {4, 1, 5, 1}}));
  Layer layer(n, o, i, rank, seed * 100);
  layer.order = GENERATE(MaskOrder::kBeforeCurvature, MaskOrder::kAfterCurvature);
  return layer;
}

io::JsonObject options_of(const std::string& text) {
  auto document = std::make_shared<io::JsonDocument>();
  document->value = io::parse_json(text, "r.json");
  document->file = "r.json";
  return io::JsonObject(document);
}

std::shared_ptr<backbones::Backbone> small_t5(std::uint64_t seed) {
  const io::Json config{{"model_type", "t5"}, {"vocab_size", 60}, {"d_model", 12}, {"d_kv", 4},  {"d_ff", 18},
                        {"num_layers", 2},    {"num_heads", 3},   {"feed_forward_proj", "gated-gelu"}};
  backbones::BuildOptions build;
  build.tensors = at::TensorOptions(at::kDouble);
  auto model = backbones::build(config, "small", build);
  auto generator = tensor::cpu_generator(seed, "weights");
  model->initialize(generator, std::nullopt);
  return model;
}

backbones::Inputs sentences() {
  const auto ids = torch::tensor({{7, 8, 9, 10, 1}, {11, 12, 1, 0, 0}, {13, 1, 14, 15, 1}}, at::kLong);
  return {ids, (ids != 0).to(at::kLong), {}};
}

}  // namespace

TEST_CASE("L-01 an upcycled model computes what the dense one computed", "[routing][law]") {
  const std::string experts = GENERATE(
      R"({"method": "camex", "num_experts": 3, "protocol": "domain_specific", "alpha": 0.7})",
      R"({"method": "camex", "num_experts": 3, "protocol": "ties", "curvature": {"rank": 3}})",
      R"({"method": "camex", "num_experts": 2, "protocol": "ties", "ties_density": 0.4, "alpha": 1.3})",
      R"({"method": "camex", "num_experts": 4, "protocol": "dare", "dare_p": 0.5, "curvature": {"rank": 1}, "router": {"top_k": 2}})",
      R"({"method": "camex", "profile": "release", "num_experts": 3, "protocol": "ties", "curvature": {}})",
      R"({"method": "camex", "profile": "release", "num_experts": 3, "protocol": "dare", "dare_p": 0.5, "curvature": {"rank": 2}})",
      R"({"method": "camex", "profile": "release", "num_experts": 5, "router": {"top_k": 2}})",
      R"({"method": "camex", "num_experts": 3, "curvature": {}, "share_curvature_across_layers": true, "router_scope": "per_ffn"})",
      R"({"method": "soft_merge", "num_experts": 3, "router": {"expert_dropout": 0.5}})",
      R"({"method": "soft_merge", "num_experts": 3, "router_scope": "per_ffn", "router": {"kind": "noisy_top_k", "level": "token"}})",
      R"({"method": "smoe", "num_experts": 4, "router": {"top_k": 2}})");
  INFO(experts);
  const auto model = small_t5(5);
  const auto inputs = sentences();
  nn::ForwardContext dense_context;
  const auto dense = model->forward(inputs, dense_context);
  auto generator = tensor::cpu_generator(5, "experts");
  auto set = upcycle(model->feed_forwards(), ExpertOptions::read(options_of(experts)), generator);
  CHECK(set.places().size() == 12);
  for (const bool training : {false, true}) {
    tensor::RandomStreams random(3, at::kCPU);
    set.begin(training, &random);
    nn::ForwardContext context;
    require_close("logits", model->forward(inputs, context), dense, {1e-9, 1e-9});
  }
}

TEST_CASE("L-02 alpha 0 is the base, and nothing else gets a gradient", "[routing][law]") {
  auto layer = generated();
  for (auto* t : {&layer.base, &layer.experts, &layer.scores, &layer.curvature.c1_out}) t->set_requires_grad(true);
  const auto merged = layer.merge(0.0);
  require_close("merged", merged, layer.base.unsqueeze(0).expand_as(merged), {0.0, 0.0});
  (merged * layer.g).sum().backward();
  for (const auto* t : {&layer.experts, &layer.scores, &layer.curvature.c1_out}) {
    CHECK(t->grad().abs().max().item<double>() == 0.0);
  }
}

TEST_CASE("L-04 a fresh curvature of the release is the rank times the identity", "[routing][law]") {
  auto layer = generated();
  const auto rank = static_cast<double>(layer.curvature.c1_out.size(0));
  layer.curvature.initialize(RankInit::kIdentityEachSum);
  require_close("M tau", layer.curvature.forward(layer.tau()), rank * layer.tau(), kLaw);
  require_close("merge", layer.merge(0.7), layer.merge(0.7 * rank, {}, false), {1e-10, 1e-11});
  const auto mask = ties_mask(layer.tau(), 1.0);
  require_close("ties", layer.merge(0.7, mask), layer.merge(0.7 * rank, mask, false), {1e-10, 1e-11});
}

TEST_CASE("L-20e a fresh curvature of the release pushes the base by 1 - r and the experts by r", "[routing][law]") {
  const auto rank = GENERATE(1, 2, 8);
  Layer layer(3, 6, 4, rank, 40);
  layer.curvature.initialize(RankInit::kIdentityEachSum);
  for (auto* t : {&layer.base, &layer.experts}) t->set_requires_grad(true);
  (layer.merge(1.0) * layer.g).sum().backward();
  const auto r = static_cast<double>(rank);
  require_close("base", layer.base.grad(), (1.0 - r) * layer.g.sum(0), {1e-10, 1e-11});
  require_close("experts", layer.experts.grad().sum(0), r * layer.g.sum(0), {1e-10, 1e-11});
}

TEST_CASE("L-03, L-04 a fresh curvature of any rank is the identity", "[routing][law]") {
  auto layer = generated();
  layer.curvature.initialize();
  const auto mask = ties_mask(layer.tau(), 1.0);
  require_close("no mask", layer.merge(0.8), layer.merge(0.8, {}, false), kLaw);
  require_close("ties", layer.merge(0.8, mask), layer.merge(0.8, mask, false), kLaw);
  require_close("M tau", layer.curvature.forward(layer.tau()), layer.tau(), kLaw);
}

TEST_CASE("L-05 at alpha 1 without mask and curvature the merge is the soft merge", "[routing][law]") {
  auto layer = generated();
  for (auto* t : {&layer.base, &layer.experts}) t->set_requires_grad(true);
  const auto merged = layer.merge(1.0, {}, false, Form::kAutomatic);
  const auto soft = torch::matmul(layer.scores, layer.experts.flatten(1)).view_as(merged);
  require_close("soft merge", merged, soft, kLaw);
  require_close("the other form", layer.merge(1.0, {}, false), soft, kLaw);
  (merged * layer.g).sum().backward();
  CHECK(!layer.base.grad().defined());  // exactly nothing, not rounding noise
}

TEST_CASE("without curvature a mask that keeps an entry everywhere leaves the base exactly no gradient there", "[routing][law]") {
  auto layer = generated();
  for (auto* t : {&layer.base, &layer.experts}) t->set_requires_grad(true);
  const auto mask = ties_mask(layer.tau(), 1.0);
  const auto merged = layer.merge(1.0, mask, false, Form::kAutomatic);
  require_close("the same weights", merged, layer.merge(1.0, mask, false), {1e-10, 1e-12});
  (merged * layer.g).sum().backward();
  const auto silent = std::get<0>(mask.min(0)) == 1.0;
  CHECK((layer.base.grad().masked_select(silent) == 0.0).all().item<bool>());
}

TEST_CASE("L-06, L-07, L-08 convexity, uniform scores, linearity", "[routing][law]") {
  auto layer = generated();
  const auto soft = torch::matmul(layer.scores, layer.experts.flatten(1)).view({layer.u, layer.o, layer.i});
  require_close("convex", layer.merge(0.3, {}, false), 0.7 * layer.base + 0.3 * soft, kLaw);

  const auto scores = layer.scores;
  layer.scores = torch::full_like(scores, 1.0 / static_cast<double>(layer.n));
  require_close("uniform", layer.merge(0.9, {}, false)[0], layer.base + 0.9 * layer.tau().mean(0), kLaw);
  layer.scores = scores;

  const auto step = layer.merge(1.0) - layer.base;
  require_close("homogeneous in alpha", layer.merge(0.37) - layer.base, 0.37 * step, kLaw);
  layer.scores = 2.5 * scores;
  require_close("linear in scores", layer.merge(1.0) - layer.base, 2.5 * step, kLaw);
  layer.scores = scores;
  layer.experts = layer.base + 3.0 * layer.tau();
  require_close("linear in task vectors", layer.merge(1.0) - layer.base, 3.0 * step, kLaw);

  layer.experts = layer.base.unsqueeze(0) + seeded_normal({1, layer.o, layer.i}, 9).expand({layer.n, -1, -1});
  const auto equal_experts = layer.merge(0.9, {}, false);
  layer.scores = torch::softmax(seeded_normal({layer.u, layer.n}, 77), -1);
  require_close("equal experts: scores do not matter", layer.merge(0.9, {}, false), equal_experts, kLaw);
}

TEST_CASE("L-09, L-10 experts permute together with their factors; a common shift shifts", "[routing][law]") {
  auto layer = generated();
  const auto merged = layer.merge(0.9, ties_mask(layer.tau(), 1.0));
  const auto delta = seeded_normal({layer.o, layer.i}, 55);
  auto shifted = layer;
  shifted.base = layer.base + delta;
  shifted.experts = layer.experts + delta;
  require_close("translation", shifted.merge(0.9, ties_mask(layer.tau(), 1.0)), merged + delta, {1e-9, 1e-10});

  auto permuted = layer;
  permuted.experts = layer.experts.flip(0);
  permuted.scores = layer.scores.flip(1);
  const auto mask = ties_mask(permuted.tau(), 1.0);
  for (auto* f : {&permuted.curvature.c1_out, &permuted.curvature.c2_out, &permuted.curvature.c1_in, &permuted.curvature.c2_in}) {
    *f = f->flip(1);
  }
  require_close("permutation", permuted.merge(0.9, mask), merged, kLaw);
  if (layer.n > 1) {
    auto wrong = permuted;
    wrong.scores = layer.scores;
    CHECK(test::compare(wrong.merge(0.9, mask), merged, kLaw).worst > 1.0);
  }
}

TEST_CASE("L-11, L-12 three forms of the same layer", "[routing][law]") {
  const auto layer = generated();
  const auto x = seeded_normal({layer.u, 5, layer.i}, 21);
  const auto mask = GENERATE(true, false) ? ties_mask(layer.tau(), 1.0) : Tensor();
  const double alpha = 0.6;
  const auto y = torch::bmm(x, layer.merge(alpha, mask).transpose(1, 2));
  const auto folded = torch::bmm(x, layer.merge(alpha, mask, true, Form::kAbsorbed).transpose(1, 2));
  require_close("folded", folded, y, {1e-9, 1e-11});
  const auto gamma = layer.gamma(mask);
  auto activations = torch::matmul(x, layer.base.t());
  for (std::int64_t e = 0; e < layer.n; ++e) {
    activations = activations + alpha * layer.scores.select(1, e).view({-1, 1, 1}) * torch::matmul(x, gamma[e].t());
  }
  require_close("activations", activations, y, {1e-9, 1e-11});
}

TEST_CASE("L-13 the step from the base is bounded", "[routing][law]") {
  const auto layer = generated();
  double norm_m = 0.0, norm_tau = 0.0;
  for (std::int64_t e = 0; e < layer.n; ++e) {
    norm_m = std::max(norm_m, torch::linalg_matrix_norm(layer.matrix(e), 2).item<double>());
    norm_tau = std::max(norm_tau, layer.tau()[e].norm().item<double>());
  }
  const auto steps = (layer.merge(0.9) - layer.base).flatten(1).norm(2, 1);
  CHECK(steps.max().item<double>() <= 0.9 * norm_m * norm_tau * (1 + 1e-12));
}

TEST_CASE("L-14 to L-18 the Kronecker operator", "[routing][law]") {
  auto layer = generated();
  const auto tau = layer.tau();
  const auto curved = layer.curvature.forward(tau);
  require_close("full matrix", curved, layer.curved_by_matrix(tau), kLaw);

  Tensor two_sided;
  for (std::int64_t r = 0; r < layer.curvature.c1_out.size(0); ++r) {
    std::vector<Tensor> parts;
    for (std::int64_t e = 0; e < layer.n; ++e) {
      parts.push_back(torch::kron(layer.curvature.c1_out[r][e], layer.curvature.c2_out[r][e])
                          .mm(tau[e])
                          .mm(torch::kron(layer.curvature.c1_in[r][e], layer.curvature.c2_in[r][e]).t()));
    }
    two_sided = two_sided.defined() ? two_sided + torch::stack(parts) : torch::stack(parts);
  }
  require_close("two-sided", curved, two_sided, kLaw);

  auto scaled = layer.curvature;
  scaled.c2_in = 4.0 * layer.curvature.c2_in;
  require_close("scaling one factor", scaled.forward(tau), 4.0 * curved, kLaw);
  scaled.c1_out = 0.25 * layer.curvature.c1_out;
  require_close("scaling two against each other", scaled.forward(tau), curved, kLaw);

  Layer rank1(3, 6, 4, 1, 7);
  for (auto* f : {&rank1.curvature.c1_out, &rank1.curvature.c2_out, &rank1.curvature.c1_in, &rank1.curvature.c2_in}) {
    *f = std::get<0>(torch::linalg_qr(f->detach()));
  }
  const auto rotated = rank1.curvature.forward(rank1.tau());
  require_close("orthogonal factors keep the norm", rotated.flatten(1).norm(2, 1), rank1.tau().flatten(1).norm(2, 1), kLaw);
}

TEST_CASE("L-16, L-19 factor pairs and their counts", "[routing][law]") {
  for (std::int64_t w = 1; w < 600; ++w) {
    const auto [a, b] = factor_pair(w);
    REQUIRE(a * b == w);
    REQUIRE(a <= b);
    for (auto larger = a + 1; larger * larger <= w; ++larger) REQUIRE(w % larger != 0);
  }
  Curvature curvature(2, 7, 768, 3072, at::TensorOptions(at::kMeta));
  std::int64_t count = 0;
  for (const auto& p : curvature.parameters()) count += p.numel();
  CHECK(count == 2 * 7 * 8000);
}

TEST_CASE("L-20 gradients of the merge", "[routing][law]") {
  auto layer = generated();
  const double alpha = 0.8;
  const bool masked = GENERATE(true, false);
  const auto mask = masked ? ties_mask(layer.tau(), 1.0) : Tensor();
  for (auto* t : {&layer.base, &layer.experts, &layer.scores, &layer.curvature.c1_out, &layer.curvature.c2_in}) {
    *t = t->detach().clone().set_requires_grad(true);
  }
  (layer.merge(alpha, mask) * layer.g).sum().backward();
  const torch::NoGradGuard no_grad;
  const auto ones = torch::ones_like(layer.experts);
  const auto kept = masked ? mask : ones;
  const bool mask_first = layer.order == MaskOrder::kBeforeCurvature;
  const auto tau = mask_first ? layer.tau() * kept : layer.tau();

  std::vector<Tensor> expert_gradients;
  for (std::int64_t e = 0; e < layer.n; ++e) {
    const auto weighted = (layer.scores.select(1, e).view({-1, 1, 1}) * layer.g).sum(0);
    const auto reaching = mask_first ? weighted : kept[e] * weighted;
    const auto gradient = torch::mv(layer.matrix(e).t(), reaching.flatten()).view({layer.o, layer.i});
    expert_gradients.push_back(alpha * (mask_first ? kept[e] * gradient : gradient));
  }
  require_close("b: experts", layer.experts.grad(), torch::stack(expert_gradients), kLaw);
  require_close("b: conservation", layer.base.grad() + layer.experts.grad().sum(0), layer.g.sum(0), {1e-10, 1e-10});
  const auto gamma = layer.gamma(mask);
  require_close("c: scores", layer.scores.grad(), alpha * torch::matmul(layer.g.flatten(1), gamma.flatten(1).t()), {1e-10, 1e-10});

  // a: dL/dM_j = alpha sum_u s_uj vec(G_u) vec(tau_j)^T, seen through one factor by differences.
  for (auto* factor : {&layer.curvature.c1_out, &layer.curvature.c2_in}) {
    const auto analytic = factor->grad().clone();
    const auto original = *factor;
    const auto numeric = test::finite_differences(
        [&](const Tensor& f) {
          *factor = f;
          return (layer.merge(alpha, mask) * layer.g).sum().item<double>();
        },
        original);
    *factor = original;
    require_close("a: factor", analytic, numeric, {1e-6, 1e-7});
  }
  if (layer.curvature.c1_out.size(0) == 1 && layer.o <= 6) {
    // Full form: the product of the operator's gradient with any direction equals the derivative along it.
    const auto direction = seeded_normal({layer.o * layer.i, layer.o * layer.i}, 31);
    auto weighted = (layer.scores.select(1, 0).view({-1, 1, 1}) * layer.g).sum(0).flatten();
    if (!mask_first) weighted = kept[0].flatten() * weighted;
    const auto gradient = alpha * torch::outer(weighted, tau[0].flatten());
    const auto along = alpha * torch::dot(weighted, torch::mv(direction, tau[0].flatten()));
    require_close("a: full form", (gradient * direction).sum(), along, {1e-10, 1e-10});
  }
}

TEST_CASE("L-20d at tau = 0 curvature and scores get no gradient", "[routing][law]") {
  auto layer = generated();
  layer.experts = layer.base.repeat({layer.n, 1, 1});
  std::vector<Tensor*> silent{&layer.scores, &layer.curvature.c1_out, &layer.curvature.c2_out, &layer.curvature.c1_in, &layer.curvature.c2_in};
  for (auto* t : silent) *t = t->detach().clone().set_requires_grad(true);
  layer.experts.set_requires_grad(true);
  (layer.merge(0.8, ties_mask(layer.tau().detach(), 1.0)) * layer.g).sum().backward();
  for (auto* t : silent) CHECK(t->grad().abs().max().item<double>() == 0.0);
  CHECK(layer.experts.grad().abs().max().item<double>() > 0.0);
}

TEST_CASE("L-20f, L-22 the TIES mask", "[routing][law]") {
  const auto layer = generated();
  const auto tau = layer.tau();
  const auto mask = ties_mask(tau, 1.0);
  CHECK(!mask.requires_grad());
  CHECK(torch::equal(ties_mask(7.5 * tau, 1.0), mask));
  CHECK(mask.sum(0).min().item<double>() >= 1.0);
  if (layer.n == 1) CHECK(mask.min().item<double>() == 1.0);
  CHECK(ties_mask(torch::zeros_like(tau), 1.0).all().item<bool>());
  CHECK(ties_mask(tau.abs(), 1.0).all().item<bool>());
  auto with_gradient = tau.clone().set_requires_grad(true);
  CHECK(!ties_mask(with_gradient, 0.5).requires_grad());
}

TEST_CASE("L-23 TIES keeps exactly the density before the election", "[routing][law]") {
  const auto tau = seeded_normal({1, 10, 10}, 3).abs();  // one expert, one sign: the election keeps all that is left
  for (const double density : {0.01, 0.2, 0.29, 0.57, 0.999, 1.0}) {
    INFO(density);
    CHECK(ties_mask(tau, density).sum().item<double>() == std::floor(100.0 * density + 1e-9));
  }
  // What is kept are the largest.
  const auto kept = ties_mask(tau, 0.2) > 0;
  CHECK(tau.masked_select(kept).min().item<double>() >= tau.masked_select(~kept).max().item<double>());
  // Equal magnitudes: the lower index stays.
  const auto equal = ties_mask(torch::ones({1, 2, 2}, at::kDouble), 0.5).flatten();
  CHECK(torch::equal(equal, torch::tensor({1.0, 1.0, 0.0, 0.0}, at::kDouble)));
}

TEST_CASE("L-24 DARE keeps the expectation, and nothing at evaluation", "[routing][law]") {
  const auto tau = seeded_normal({2, 20, 30}, 8);
  const double p = GENERATE(0.1, 0.5, 0.9);
  auto generator = tensor::cpu_generator(4, "dare");
  const int draws = 400;
  auto sum = torch::zeros_like(tau);
  for (int d = 0; d < draws; ++d) sum += values(dare_mask(tau, p, generator));
  // The mean of all entries of all draws: variance p / (1 - p) each.
  const auto entries = static_cast<double>(draws * tau.numel());
  CHECK(std::abs(sum.mean().item<double>() / draws - 1.0) < 5.0 * std::sqrt(p / (1 - p) / entries));
  // p is a multiple of 2^-16, and the scale that multiple's own: the expectation stays exact.
  CHECK(std::abs(1.0 / dare_mask(tau, p, generator).scale - (1.0 - p)) <= 0x1p-17);

  auto again = tensor::cpu_generator(4, "dare");
  auto first = tensor::cpu_generator(4, "dare");
  CHECK(torch::equal(values(dare_mask(tau, p, again)), values(dare_mask(tau, p, first))));
  CHECK(values(dare_mask(tau, 0.0, again)).eq(1.0).all().item<bool>());

  auto recipe = options_of(R"({"dare_p": 0.5})");
  const auto masks = kDare.configure(recipe, Profile::kPaper);
  CHECK(!masks.entries(tau, tau[0], /*training=*/false, nullptr).keep_NOI.defined());
  CHECK(!masks.units);
}

TEST_CASE("L-24 DARE of whole experts: one number a unit and expert, fresh in every pass, none at evaluation", "[routing][law]") {
  const double p = 0.5;
  const std::int64_t n = 4, batch = 3;
  auto recipe = options_of(R"({"method": "camex", "profile": "release", "num_experts": 4, "protocol": "dare", "dare_p": 0.5, "curvature": {"rank": 2}})");
  auto layer = std::dynamic_pointer_cast<MergedLinear>(ExpertOptions::read(recipe).make_layer({seeded_normal({6, 8}, 1)}));
  auto generator = tensor::cpu_generator(1, "experts");
  layer->initialize(generator);
  const torch::NoGradGuard no_grad;
  layer->experts.add_(seeded_normal({n, 6, 8}, 2));
  layer->router->named_parameters()["w_gate"].copy_(seeded_normal({8, n}, 3));
  const auto x = seeded_normal({batch, 5, 8}, 4);

  tensor::RandomStreams random(7, at::kCPU), same(7, at::kCPU);
  layer->begin(true, &random);
  nn::ForwardContext context{.training = true, .random = &random};
  const auto first = layer->forward(x, context), second = layer->forward(x, context);
  CHECK(test::compare(first, second, kLaw).worst > 1.0);

  // The same by the definition: E_m + sum_i s_i d_i M_i tau_i with d of the same stream.
  nn::ForwardContext again{.training = true, .random = &same};
  const auto scores = layer->router->forward(x.mean(1), again).scores_UN;
  const auto drop = values(dare_mask(scores, p, same.stream("dare")));
  CHECK(((drop == 0) | (drop == 1 / (1 - p))).all().item<bool>());
  const auto gamma = layer->curvature->forward(layer->experts - layer->weight);
  const auto weights = layer->weight + torch::matmul(scores * drop, gamma.flatten(1)).view({batch, 6, 8});
  require_close("by the definition", first, torch::bmm(x, weights.transpose(1, 2)), {1e-9, 1e-10});

  layer->begin(false, nullptr);
  nn::ForwardContext evaluation;
  const auto clean = layer->router->forward(x.mean(1), evaluation).scores_UN;
  const auto kept = layer->weight + torch::matmul(clean, gamma.flatten(1)).view({batch, 6, 8});
  require_close("evaluation", layer->forward(x, evaluation), torch::bmm(x, kept.transpose(1, 2)), {1e-9, 1e-10});
}

TEST_CASE("L-25 mask first and mask last differ but for a multiple of the identity", "[routing][law]") {
  Layer layer(3, 6, 4, 1, 12);
  const auto mask = ties_mask(layer.tau(), 1.0);
  const auto in_order = [&](MaskOrder order) {
    layer.order = order;
    return layer.merge(0.9, mask);
  };
  const auto differ = [&] {
    return test::compare(in_order(MaskOrder::kBeforeCurvature), in_order(MaskOrder::kAfterCurvature), kLaw).worst;
  };
  CHECK(differ() > 1.0);
  layer.curvature.initialize();
  layer.curvature.c1_in = 3.0 * layer.curvature.c1_in;
  CHECK(differ() <= 1.0);
}

TEST_CASE("L-27, L-28 router scores", "[routing][law]") {
  const auto k = GENERATE(1, 2, 5);
  const auto h = seeded_normal({9, 4}, 1), w = seeded_normal({4, 5}, 2), wn = seeded_normal({4, 5}, 3);
  const auto noise = GENERATE(true, false) ? seeded_normal({9, 5}, 4) : Tensor();
  const auto s = noisy_top_k(h, w, wn, noise, k).scores_UN;
  CHECK(s.min().item<double>() >= 0.0);
  require_close("sum", s.sum(1), torch::ones({9}, at::kDouble), kLaw);
  CHECK(torch::equal((s > 0).sum(1), torch::full({9}, k, at::kLong)));
  if (k == 5 && !noise.defined()) require_close("softmax", s, torch::softmax(torch::matmul(h, w), -1), kLaw);
  if (!noise.defined()) {
    CHECK(torch::equal(noisy_top_k(h, w, wn, {}, k).scores_UN, s));
    const auto bias_h = torch::cat({h, torch::ones({9, 1}, at::kDouble)}, 1);
    const auto bias_w = torch::cat({w, torch::full({1, 5}, 3.7, at::kDouble)}, 0);
    require_close("a constant on all logits", noisy_top_k(bias_h, bias_w, torch::zeros_like(bias_w), {}, k).scores_UN, s, {1e-9, 1e-12});
  }
  const auto uniform = noisy_top_k(h, torch::zeros_like(w), wn, {}, 5).scores_UN;
  require_close("zero router", uniform, torch::full_like(uniform, 0.2), kLaw);
  // Equal logits fall to the lower index.
  CHECK((noisy_top_k(h, torch::zeros_like(w), wn, {}, 2).scores_UN.slice(1, 0, 2) > 0).all().item<bool>());
}

TEST_CASE("L-29 balance loss", "[routing][law]") {
  CHECK(cv_squared(torch::full({6}, 2.5, at::kDouble)).item<double>() == Approx(0.0).margin(1e-15));
  CHECK(cv_squared(torch::tensor({1.0, 3.0}, at::kDouble)).item<double>() == Approx(0.5).epsilon(1e-9));
  CHECK(cv_squared(torch::ones({1}, at::kDouble)).item<double>() == 0.0);
  const auto h = seeded_normal({9, 4}, 1), w = seeded_normal({4, 5}, 2);
  const auto gating = noisy_top_k(h, w, w, seeded_normal({9, 5}, 4), 5);
  CHECK(cv_squared(gating.load_N).item<double>() == 0.0);
  CHECK(balance_loss(gating, 0.01).item<double>() > 0.0);
}

TEST_CASE("L-48 unknown names are errors", "[routing][law]") {
  const auto error = [](const std::string& text) {
    return test::user_error([&] { ExpertOptions::read(options_of(text)); });
  };
  CHECK(error(R"({"method": "CAMex"})").find("did you mean \"camex\"?") != std::string::npos);
  CHECK(error(R"({"method": "camex", "protocol": "tise"})").find("did you mean \"ties\"?") != std::string::npos);
  CHECK(error(R"({"method": "camex", "router": {"kind": "noisy_topk"}})").find("did you mean \"noisy_top_k\"?") != std::string::npos);
  CHECK(error(R"({"method": "camex", "profile": "relase"})").find("did you mean \"release\"?") != std::string::npos);
  CHECK(error(R"({"method": "camex", "protocol": "dare", "dare_mode": "expert_channel", "form": "absorbed"})") ==
        "r.json#/form: got \"absorbed\", but scores whose experts are dropped do not sum to 1; expected automatic or base");
  CHECK(error(R"({"method": "camex", "share_curvature_across_layers": true})").find("no curvature to share") != std::string::npos);
  CHECK(error(R"({"method": "soft_merge", "auxiliary_loss": 0.1})").find("router \"smear\" has no balance loss") != std::string::npos);
  CHECK(error(R"({"method": "soft_merge", "alpha": 0.5})").find("unknown key \"alpha\"") != std::string::npos);
  CHECK(error(R"({"method": "camex", "num_experts": 8, "router": {"top_k": 9}})") ==
        "r.json#/router/top_k: got 9, expected 1..8 (num_experts is 8); lower top_k or add experts");
  CHECK(error(R"({"method": "camex", "ties_density": 0.5})").find("unknown key \"ties_density\"") != std::string::npos);
}

TEST_CASE("L-49 with k = n every expert contributes to every unit", "[routing][law]") {
  const auto model = small_t5(6);
  auto generator = tensor::cpu_generator(6, "experts");
  auto set = upcycle(model->feed_forwards(), ExpertOptions::read(options_of(R"({"method": "camex", "num_experts": 5, "protocol": "ties"})")), generator);
  const torch::NoGradGuard no_grad;
  set.begin(false, nullptr);
  nn::ForwardContext context;
  model->forward(sentences(), context);
  const auto report = set.report();
  CHECK(report.experts_per_unit == 5.0);
  CHECK(report.router_entropy == Approx(std::log(5.0)).epsilon(0.05));
  CHECK(report.task_vector_ratio == 0.0);
  CHECK(report.kept_fraction == 1.0);
}

TEST_CASE("padding changes nothing: scores, outputs, statistics", "[routing][law]") {
  const std::string experts = GENERATE(R"({"method": "camex", "num_experts": 3, "protocol": "ties", "curvature": {}})",
                                       R"({"method": "smoe", "num_experts": 3})");
  const auto model = small_t5(8);
  auto generator = tensor::cpu_generator(8, "experts");
  auto set = upcycle(model->feed_forwards(), ExpertOptions::read(options_of(experts)), generator);
  const torch::NoGradGuard no_grad;
  for (const auto& item : model->named_parameters()) {
    item.value().add_(0.05 * seeded_normal(item.value().sizes(), static_cast<std::uint64_t>(item.value().numel())));
  }
  const auto inputs = sentences();
  const auto wide_ids = torch::cat({inputs.input_ids_BT, torch::zeros({3, 4}, at::kLong)}, 1);
  std::vector<Tensor> logits;
  std::vector<double> entropies;
  for (const auto& in : {inputs, backbones::Inputs{wide_ids, (wide_ids != 0).to(at::kLong), {}}}) {
    set.begin(false, nullptr);
    nn::ForwardContext context;
    logits.push_back(model->forward(in, context));
    entropies.push_back(set.report().router_entropy);
  }
  require_close("logits", logits[1], logits[0], {1e-9, 1e-10});
  // The decoder's own padding (behind the last </s>) is no part of the mean either.
  CHECK(entropies[1] == Approx(entropies[0]).epsilon(1e-9));
}

TEST_CASE("the mixture is made once a step, and no weight exists for each unit and expert, in tiles not even for each unit",
          "[routing][law]") {
  const auto dense = seeded_normal({12, 20}, 1);
  const bool tiled = GENERATE(true, false);
  auto recipe = options_of(fmt::format(
      R"({{"method": "camex", "num_experts": 5, "protocol": "dare", "dare_p": 0.5, "curvature": {{"rank": 2}}, "product": "{}"}})",
      tiled ? "tiled" : "merged"));
  auto layer = std::dynamic_pointer_cast<MergedLinear>(ExpertOptions::read(recipe).make_layer({dense}));
  auto generator = tensor::cpu_generator(1, "experts");
  layer->initialize(generator);
  {
    const torch::NoGradGuard no_grad;
    layer->experts.add_(seeded_normal({5, 12, 20}, 2));
  }
  tensor::RandomStreams random(1, at::kCPU);
  const std::int64_t batch = 64;
  const auto x = seeded_normal({batch, 3, 20}, 3);

  std::int64_t largest = 0;
  static thread_local std::int64_t* seen = nullptr;
  seen = &largest;
  const auto watching = at::addThreadLocalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> { return nullptr; },
          [](const at::RecordFunction& function, at::ObserverContext*) {
            for (const auto& output : function.outputs()) {
              if (output.isTensor() && output.toTensor().defined()) *seen = std::max(*seen, output.toTensor().numel());
            }
          })
          .needsOutputs(true));

  Tensor total;
  layer->begin(true, &random);
  for (int micro = 0; micro < 3; ++micro) {
    nn::ForwardContext context{.training = true, .random = &random};
    const auto y = layer->forward(x, context);
    y.square().sum().backward();
  }
  std::vector<Tensor> roots, gradients;
  layer->collect_backward(roots, gradients);
  REQUIRE(roots.size() == 1);
  torch::autograd::backward(roots, gradients);
  at::removeCallback(watching);

  CHECK(layer->num_begun() == 1);
  CHECK(layer->num_merges == 3);
  CHECK((largest >= batch * 12 * 20) == !tiled);  // the merged weights of all units
  CHECK(largest < batch * 5 * 12 * 20);           // and no weight for each unit and expert
  CHECK(layer->experts.grad().abs().max().item<double>() > 0.0);
  CHECK(layer->weight.grad().abs().max().item<double>() > 0.0);
  CHECK(layer->curvature->c2_in.grad().abs().max().item<double>() > 0.0);
}

TEST_CASE("two-stage backward equals one graph", "[routing][law]") {
  const auto dense = seeded_normal({6, 10}, 1);
  const std::string experts = GENERATE(R"({"method": "camex", "num_experts": 3, "protocol": "ties", "alpha": 0.7, "curvature": {"rank": 2}})",
                                       R"({"method": "camex", "profile": "release", "num_experts": 3, "protocol": "ties", "curvature": {"rank": 2}})",
                                       R"({"method": "soft_merge", "num_experts": 3, "router": {"kind": "noisy_top_k", "level": "token", "top_k": 3}, "auxiliary_loss": 0})",
                                       R"({"method": "camex", "num_experts": 3, "protocol": "domain_specific"})",
                                       R"({"method": "camex", "num_experts": 3, "protocol": "domain_specific", "alpha": 0.5})");
  auto layer = std::dynamic_pointer_cast<MergedLinear>(ExpertOptions::read(options_of(experts)).make_layer({dense}));
  auto generator = tensor::cpu_generator(1, "experts");
  layer->initialize(generator);
  {
    const torch::NoGradGuard no_grad;
    layer->experts.add_(seeded_normal({3, 6, 10}, 2));
  }
  const auto x1 = seeded_normal({2, 4, 10}, 3), x2 = seeded_normal({5, 4, 10}, 4);
  const auto run = [&](const std::vector<Tensor>& batches) {
    layer->zero_grad();
    layer->begin(true, nullptr);
    for (const auto& x : batches) {
      nn::ForwardContext context;  // no noise
      layer->forward(x, context).square().sum().backward();
    }
    std::vector<Tensor> roots, gradients;
    layer->collect_backward(roots, gradients);
    if (!roots.empty()) torch::autograd::backward(roots, gradients);
    std::vector<Tensor> result;
    for (const auto& p : layer->parameters()) result.push_back(p.grad().defined() ? p.grad().clone() : torch::zeros_like(p));
    return result;
  };
  const auto together = run({torch::cat({x1, x2})}), apart = run({x1, x2});
  for (std::size_t i = 0; i < together.size(); ++i) require_close("gradient", apart[i], together[i], {1e-9, 1e-10});
}

TEST_CASE("a generating decoder refuses sentence routing and takes token routing", "[routing]") {
  const io::Json config{{"model_type", "t5"}, {"vocab_size", 60}, {"d_model", 12}, {"d_kv", 4}, {"d_ff", 18}, {"num_layers", 1}, {"num_heads", 3}};
  backbones::BuildOptions build;
  build.head = backbones::Head::kLanguageModel;
  const auto model = backbones::build(config, "small", build);
  auto generator = tensor::cpu_generator(1, "experts");
  const auto message = test::user_error([&] {
    upcycle(model->feed_forwards(), ExpertOptions::read(options_of(R"({"method": "camex"})")), generator);
  });
  CHECK(message.find("see later tokens") != std::string::npos);
  const auto other = backbones::build(config, "small", build);
  CHECK(upcycle(other->feed_forwards(), ExpertOptions::read(options_of(R"({"method": "smoe"})")), generator).places().size() == 4);
  CHECK(test::user_error([&] {
          upcycle(backbones::build(config, "small", build)->feed_forwards(),
                  ExpertOptions::read(options_of(R"({"method": "smoe", "linears": ["wii"]})")), generator);
        }).find("did you mean \"wi\"?") != std::string::npos);
}

TEST_CASE("registries of routing: unique snake_case names, summaries, sources, defaults", "[routing]") {
  const auto check = [](const auto& entries) {
    std::set<std::string> names;
    for (const auto* entry : entries) {
      INFO(entry->name);
      CHECK(names.insert(entry->name).second);
      CHECK(std::string(entry->name).find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == std::string::npos);
      CHECK(!std::string(entry->summary).empty());
      CHECK(!std::string(entry->paper).empty());
      CHECK(test::is_documented(entry->name));
    }
  };
  check(method_registry());
  check(protocol_registry());
  check(router_registry());
  check(backbones::registry());
  for (const auto* method : method_registry()) {
    const auto options = ExpertOptions::read(options_of(fmt::format(R"({{"method": "{}"}})", method->name)));
    CHECK(options.make_layer({seeded_normal({6, 4}, 1)}) != nullptr);
  }
}
