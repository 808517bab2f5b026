#include <torch/torch.h>

#include "backbones/t5.h"
#include "routing/merged_linear.h"
#include "routing/method.h"
#include "routing/noisy_top_k.h"
#include "routing/smoe_linear.h"
#include "routing/ties.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/tensors.h"

// Cases of golden/camex in float64: forward values and gradients from independent implementations.

using namespace mergex;
using namespace mergex::routing;
namespace fs = std::filesystem;

namespace {

struct Case {
  std::string id;
  io::Json json;
  test::Tensors tensors;
  test::Tolerance tolerance;
  double largest = 0.0;

  explicit Case(const fs::path& file)
      : id(file.stem().string()), json(io::read_json(file)), tensors(test::read_tensors(fs::path(file).replace_extension(".safetensors"))) {
    const auto& t = json.at("tolerance");
    tolerance = {t.at("rtol"), t.at("atol")};
  }

  template <class T = double>
  T param(const char* key) const { return json.at("params").at(key).get<T>(); }
  bool has(const std::string& key) const { return tensors.contains(key); }
  Tensor operator[](const std::string& key) const { return tensors.at(key); }
  /// An input or parameter that gradients are asked of.
  Tensor leaf(const std::string& key) { return tensors.at(key).detach().clone().set_requires_grad(true); }

  void check(const std::string& key, const Tensor& got) {
    // Entries far below the largest one are rounding of the sums that gave it.
    const auto scale = std::max(tensors.at(key).abs().max().item<double>(), 0.01);
    test::require_close(id + " " + key, got, tensors.at(key), {tolerance.relative, tolerance.relative * scale});
    largest = std::max(largest, test::compare(got, tensors.at(key), tolerance).difference);
  }
  void check_gradient(const std::string& key, const Tensor& parameter) {
    check("grad." + key, parameter.grad().defined() ? parameter.grad() : torch::zeros_like(parameter));
  }
};

/// Factors of a case, as leaves, under the names that end in `suffix`.
Curvature curvature_of(Case& c, const std::string& prefix = "") {
  const auto c1_out = c[prefix + "C1_out"], c2_out = c[prefix + "C2_out"];
  const auto c1_in = c[prefix + "C1_in"], c2_in = c[prefix + "C2_in"];
  Curvature curvature(c1_out.size(0), c1_out.size(1), c1_out.size(2) * c2_out.size(2), c1_in.size(2) * c2_in.size(2), at::kDouble);
  curvature.c1_out = c.leaf(prefix + "C1_out");
  curvature.c2_out = c.leaf(prefix + "C2_out");
  curvature.c1_in = c.leaf(prefix + "C1_in");
  curvature.c2_in = c.leaf(prefix + "C2_in");
  return curvature;
}

void check_factors(Case& c, const Curvature& curvature, const std::string& prefix = "") {
  c.check_gradient(prefix + "C1_out", curvature.c1_out);
  c.check_gradient(prefix + "C2_out", curvature.c2_out);
  c.check_gradient(prefix + "C1_in", curvature.c1_in);
  c.check_gradient(prefix + "C2_in", curvature.c2_in);
}

void kron(Case& c) {
  auto base = c.leaf("E_m"), experts = c.leaf("E");
  const auto curvature = curvature_of(c);
  const auto u = curvature.forward(experts - base);
  c.check("U", u);
  (u * c["G"]).sum().backward();
  c.check_gradient("E_m", base);
  c.check_gradient("E", experts);
  check_factors(c, curvature);
}

/// The mask that the case's protocol gives: computed for TIES, given for DARE.
Tensor mask_of(Case& c, const Tensor& tau) {
  const auto protocol = c.param<std::string>("protocol");
  if (protocol == "ties") {
    const auto mask = ties_mask(tau, c.json.at("params").value("ties_density", 1.0));
    if (c.has("mask")) REQUIRE(torch::equal(mask, c["mask"]));
    return mask;
  }
  return protocol == "dare" && c.has("mask") ? c["mask"] : Tensor();
}

void merged(Case& c) {
  const bool curved = c.has("C1_out"), has_bias = c.has("b_m");
  const auto alpha = c.param("alpha");
  // The absorbed form rests on scores that sum to 1, as every router's do.
  const bool sums_to_one = (c["scores"].sum(1) - 1.0).abs().max().item<double>() < 1e-12;
  for (const auto form : {Form::kBase, Form::kAutomatic, Form::kAbsorbed}) {
    if (form != Form::kBase && !sums_to_one) continue;
    auto x = c.leaf("x"), scores = c.leaf("scores"), base = c.leaf("E_m"), experts = c.leaf("E");
    std::optional<Curvature> curvature, bias_curvature;
    if (curved) curvature.emplace(curvature_of(c));
    const auto mask = mask_of(c, (experts - base).detach());
    const auto weight = merge_weights(make_mixture(base, experts, mask, curved ? &*curvature : nullptr, alpha, form), scores);
    auto y = torch::bmm(x, weight.transpose(1, 2));
    Tensor bias_base, bias_experts;
    if (has_bias) {
      // A bias is merged like a weight with one input.
      bias_base = c.leaf("b_m");
      bias_experts = c.leaf("b");
      const auto b = bias_base.unsqueeze(-1), e = bias_experts.unsqueeze(-1);
      bias_curvature.emplace(curvature->c1_out.size(0), e.size(0), e.size(1), 1, at::kDouble);
      bias_curvature->initialize();
      bias_curvature->c1_out = c.leaf("Cb1");
      bias_curvature->c2_out = c.leaf("Cb2");
      const auto bias_mask = c.param<std::string>("protocol") == "ties" ? ties_mask((e - b).detach(), 1.0) : Tensor();
      const auto bias = merge_weights(make_mixture(b, e, bias_mask, &*bias_curvature, alpha, form), scores).squeeze(-1);
      c.check("bias_hat", bias);
      y = y + bias.unsqueeze(1);
    }
    if (c.has("merged_weight")) c.check("merged_weight", weight);
    c.check("y", y);
    (y * c["gy"]).sum().backward();
    c.check_gradient("x", x);
    c.check_gradient("E", experts);
    c.check_gradient("E_m", base);
    // In the absorbed form the scores' gradient holds <G, E_m> besides, the same for every expert: the softmax drops it.
    if (form == Form::kBase) c.check_gradient("scores", scores);
    if (curved) check_factors(c, *curvature);
    if (has_bias) {
      c.check_gradient("b_m", bias_base);
      c.check_gradient("b", bias_experts);
      c.check_gradient("Cb1", bias_curvature->c1_out);
      c.check_gradient("Cb2", bias_curvature->c2_out);
    }
  }
}

void router_naive(Case& c) {
  auto h = c.leaf("h"), w_gate = c.leaf("W_g");
  Tensor w_noise = c.has("W_n") ? c.leaf("W_n") : torch::zeros_like(w_gate);
  const auto gating = noisy_top_k(h, w_gate, w_noise, c.has("eps") ? c["eps"] : Tensor(), c.param<std::int64_t>("k"));
  const auto auxiliary = balance_loss(gating, c.param("aux_coef"));
  c.check("scores", gating.scores_UN);
  c.check("importance", gating.importance_N);
  c.check("load", gating.load_N);
  c.check("aux_loss", auxiliary.reshape({1}));
  ((gating.scores_UN * c["Gs"]).sum() + auxiliary).backward();
  c.check_gradient("h", h);
  c.check_gradient("W_g", w_gate);
  if (c.has("grad.W_n")) c.check_gradient("W_n", w_noise);
}

void sentence_padding(Case& c) {
  const auto curvature = curvature_of(c);
  const auto mixture = make_mixture(c["E_m"], c["E"], {}, &curvature, c.param("alpha"), Form::kAutomatic);
  const auto z = masked_mean(c["x"], c["valid"]);
  const auto n = c.param<std::int64_t>("n");
  const auto scores = noisy_top_k(z, c["W_g"], torch::zeros_like(c["W_g"]), {}, n).scores_UN;
  c.check("scores_paper", scores);
  c.check("y_paper", torch::bmm(c["x"], merge_weights(mixture, scores).transpose(1, 2)));
}

void reparam(Case& c) {
  const auto curvature = curvature_of(c);
  const auto mask = mask_of(c, c["E"] - c["E_m"]);
  const auto alpha = c.param("alpha");
  const auto folded = make_mixture(c["E_m"], c["E"], mask, &curvature, alpha, Form::kAbsorbed);
  c.check("E_folded", folded.terms_NOI);
  const auto weight = merge_weights(folded, c["scores"]);
  c.check("merged_weight", weight);
  c.check("y", torch::bmm(c["x"], weight.transpose(1, 2)));
  // Scores that do not sum to 1 need the base apart.
  const auto apart = make_mixture(c["E_m"], c["E"], mask, &curvature, alpha, Form::kBase);
  c.check("y_sub", torch::bmm(c["x"], merge_weights(apart, c["scores_sub"]).transpose(1, 2)));
}

void upcycled(Case& c) {
  const auto n = c.param<std::int64_t>("n"), r = c.param<std::int64_t>("r");
  auto x = c.leaf("x"), scores = c.leaf("scores"), base = c.leaf("W");
  auto experts = c["W"].repeat({n, 1, 1}).set_requires_grad(true);
  Curvature curvature(r, n, base.size(0), base.size(1), at::kDouble);
  {
    const torch::NoGradGuard no_grad;
    for (auto* factor : {&curvature.c1_out, &curvature.c2_out, &curvature.c1_in, &curvature.c2_in}) {
      factor->copy_(torch::eye(factor->size(-1), at::kDouble).expand_as(*factor));
    }
  }
  const auto mask = ties_mask((experts - base).detach(), 1.0);
  c.check("ties_mask", mask);
  const auto mixture = make_mixture(base, experts, mask, &curvature, c.param("alpha"), Form::kBase);
  const auto y = torch::bmm(x, merge_weights(mixture, scores).transpose(1, 2));
  c.check("y", y);
  (y * c["gy"]).sum().backward();
  c.check_gradient("x", x);
  c.check_gradient("scores", scores);
  c.check_gradient("E_m", base);
  c.check_gradient("E", experts);
  check_factors(c, curvature);
}

struct FixedRouter : Router {
  explicit FixedRouter(Tensor w_gate_) : w_gate(std::move(w_gate_)) {}
  RouterOutput forward(const Tensor& z, nn::ForwardContext&) override {
    const auto gating = noisy_top_k(z, w_gate, torch::zeros_like(w_gate), {}, w_gate.size(1));
    return {gating.scores_UN, balance_loss(gating, 0.01)};
  }
  void initialize(at::Generator&) override {}
  Tensor w_gate;
};

void t5_ffn(Case& c) {
  const auto n = c.param<std::int64_t>("n"), r = c.param<std::int64_t>("r");
  const auto linear = [&](const std::string& name) {
    MergedLinearOptions o{.num_experts = n,
                          .alpha = c.param("alpha"),
                          .mask = {},
                          .curvature_rank = r,
                          .make_router = [&](const RouterShape&) {
                            return std::make_shared<FixedRouter>(c.leaf(name + ".W_g"));
                          }};
    if (c.param<std::string>("protocol") == "ties") {
      o.mask = [&](const Tensor& tau, bool, tensor::RandomStreams*) { return ties_mask(tau, 1.0); };
    }
    auto layer = std::make_shared<MergedLinear>(c[name + ".E_m"], o);
    layer->weight = c.leaf(name + ".E_m");
    layer->experts = c.leaf(name + ".E");
    *layer->curvature = curvature_of(c, name + ".");
    layer->begin(/*training=*/true, nullptr);
    return layer;
  };
  const auto wi = linear("wi"), wo = linear("wo");
  nn::RmsNorm norm(c["x"].size(-1), 1e-6, at::kDouble);
  norm.weight = c.leaf("ln.weight");
  auto x = c.leaf("x");
  nn::ForwardContext context;
  const auto hidden = torch::relu(wi->forward(norm.forward(x), context));
  c.check("hidden", hidden);
  const auto ffn = wo->forward(hidden, context);
  c.check("ffn", ffn);
  const auto y = x + ffn;
  c.check("y", y);
  c.check("aux_loss", (context.auxiliary_losses.at(0) + context.auxiliary_losses.at(1)).reshape({1}));
  (y * c["gy"]).sum().backward();
  std::vector<Tensor> roots, gradients;
  wi->collect_backward(roots, gradients);
  wo->collect_backward(roots, gradients);
  torch::autograd::backward(roots, gradients);
  c.check_gradient("x", x);
  c.check_gradient("ln.weight", norm.weight);
  for (const auto& [name, layer] : {std::pair{"wi", wi}, std::pair{"wo", wo}}) {
    const std::string prefix = std::string(name) + ".";
    c.check_gradient(prefix + "E_m", layer->weight);
    c.check_gradient(prefix + "E", layer->experts);
    c.check_gradient(prefix + "W_g", std::static_pointer_cast<FixedRouter>(layer->router)->w_gate);
    check_factors(c, *layer->curvature, prefix);
    CHECK(layer->num_begun() == 1);
    CHECK(layer->num_merges == 1);
  }
}

void smoe_vanilla(Case& c) {
  auto x = c.leaf("x"), w_gate = c.leaf("W_g"), experts = c.leaf("W_e");
  const auto flat = x.flatten(0, 1);
  const auto gating = noisy_top_k(flat, w_gate, torch::zeros_like(w_gate), {}, c.param<std::int64_t>("k"));
  c.check("scores", gating.scores_UN);
  c.check("importance", gating.importance_N);
  c.check("load", gating.load_N);
  c.check("aux_loss", balance_loss(gating, 0.01).reshape({1}));
  const auto y = mix_outputs(flat, experts, gating.scores_UN).view_as(c["y"]);
  c.check("y", y);
  (y * c["gy"]).sum().backward();
  c.check_gradient("x", x);
  c.check_gradient("W_g", w_gate);
  c.check_gradient("W_e", experts);
}

void tables(const fs::path& file) {
  const auto json = io::read_json(file);
  for (const auto& [width, pair] : json.at("factor_pairs").items()) {
    const auto [a, b] = factor_pair(std::stoll(width));
    CHECK(a == pair[0].get<std::int64_t>());
    CHECK(b == pair[1].get<std::int64_t>());
  }
  // Counted on real modules without memory.
  for (const auto& row : json.at("counts")) {
    if (row.at("model") != "t5-base") continue;
    const io::Json config{{"model_type", "t5"}, {"vocab_size", 32128}, {"d_model", row["d"]}, {"d_kv", 64},
                          {"d_ff", row["d_ff"]}, {"num_layers", 12}, {"num_heads", 12}};
    backbones::BuildOptions build;
    build.tensors = at::TensorOptions(at::kMeta);
    const auto model = backbones::build(config, "t5-base", build);
    const auto n = row.at("n").get<std::int64_t>(), rank = row.at("rank").get<std::int64_t>();
    ExpertOptions options;
    options.method = "camex";
    options.make_layer = [&](const Tensor& dense) -> std::shared_ptr<ExpertLayer> {
      auto document = std::make_shared<io::JsonDocument>();
      document->value = io::Json::object();
      io::JsonObject none(document);
      return std::make_shared<MergedLinear>(
          dense, MergedLinearOptions{.num_experts = n, .mask = {}, .curvature_rank = rank,
                                     .make_router = kNoisyTopK.configure(none, n, n)});
    };
    std::int64_t dense = 0;
    for (const auto& item : model->named_parameters()) dense += model->is_head(item.key()) ? 0 : item.value().numel();
    CHECK(dense == row.at("dense").get<std::int64_t>());
    auto generator = tensor::cpu_generator(0, "unused");
    const auto counts = upcycle(model->feed_forwards(), options, generator).count();
    CHECK(dense + counts.experts == row.at("with_experts_and_base").get<std::int64_t>());
    CHECK(counts.routers == row.at("routers").get<std::int64_t>());
    CHECK(counts.curvature == row.at("curvature").get<std::int64_t>());
    CHECK(dense + counts.experts + counts.routers + counts.curvature == row.at("total").get<std::int64_t>());
  }
}

struct Kind {
  const char* prefix;
  void (*check)(Case&);
  bool any_profile;  ///< the numbers do not depend on the profile: factors and mask are given
};
// What is promised so far; the paper profile unless any_profile.
constexpr Kind kPromised[] = {
    {"kron_", kron, false},          {"merged_", merged, false},   {"router_naive_", router_naive, false},
    {"sentence_padding_", sentence_padding, false},                {"upcycled_", upcycled, true},
    {"reparam_", reparam, false},    {"t5_ffn_", t5_ffn, false},   {"smoe_vanilla_", smoe_vanilla, false},
};

// Promised by nobody yet.
constexpr std::string_view kLater[] = {"dynamic_", "segment_", "twin_", "topk_sparse_", "router_stablemoe_", "router_xmoe_",
                                       "router_expert_choice_"};

}  // namespace

TEST_CASE("CAMEx equals the golden cases of the paper profile", "[routing][golden]") {
  const auto root = test::golden_folder("camex");
  if (!root) return;
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(*root)) {
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  }
  std::ranges::sort(files);
  for (const auto& file : files) {
    const auto name = file.stem().string();
    INFO(name);
    if (name == "tables") {
      tables(file);
      test::log_golden("camex/" + name, "ok, exact");
      continue;
    }
    const auto* kind = std::ranges::find_if(kPromised, [&](const Kind& k) { return name.starts_with(k.prefix); });
    const bool known = std::ranges::any_of(kLater, [&](std::string_view prefix) { return name.starts_with(prefix); });
    if (kind == std::end(kPromised)) {
      test::log_golden("camex/" + name, known ? "later" : "unknown");
      CHECK(known);
      continue;
    }
    if (!kind->any_profile && io::read_json(file).at("profile").get<std::string>().find("paper") == std::string::npos) {
      test::log_golden("camex/" + name, "later (release profile)");
      continue;
    }
    Case c(file);
    kind->check(c);
    test::log_golden("camex/" + name, fmt::format("ok, largest error {:.1e}", c.largest));
  }
}
