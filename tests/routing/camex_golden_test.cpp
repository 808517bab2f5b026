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

/// The protocol's mask of any task vectors of the case: computed for TIES, given for DARE.
Mask mask_of(Case& c) {
  const auto protocol = c.param<std::string>("protocol");
  if (protocol == "ties") {
    const auto density = c.json.at("params").value("ties_density", 1.0);
    auto options = std::make_shared<io::JsonDocument>();
    options->value = {{"ties_density", density}};
    io::JsonObject json(options);
    return [&c, ties = kTies.configure(json, Profile::kPaper).entries](const Tensor& experts, const Tensor& base,
                                                                       bool training, tensor::RandomStreams* random) {
      const auto mask = ties(experts, base, training, random);
      if (c.has("mask") && experts.sizes() == c["mask"].sizes()) {
        REQUIRE(torch::equal(mask.keep_NOI.to(at::kDouble), c["mask"]));
      }
      return mask;
    };
  }
  if (protocol == "dare" && c.has("mask") && c["mask"].dim() == 3) {
    return [&c](const Tensor&, const Tensor&, bool, tensor::RandomStreams*) {
      return EntryMask(c["mask"] != 0, c["mask"].max().item<double>());
    };
  }
  return {};
}

/// A mask per unit is one number for each expert: DARE of whole experts.
UnitMask unit_mask_of(Case& c) {
  if (!c.has("mask") || c["mask"].dim() != 4) return {};
  const auto mask_UN = c["mask"].select(3, 0).select(2, 0);
  REQUIRE(torch::equal(mask_UN.unsqueeze(2).unsqueeze(3).expand_as(c["mask"]), c["mask"]));
  return [mask_UN](const Tensor&, tensor::RandomStreams&) { return mask_UN; };
}

MaskOrder order_of(Case& c) {
  return c.json.at("params").value("mask_order", "before_curvature") == "after_curvature" ? MaskOrder::kAfterCurvature
                                                                                          : MaskOrder::kBeforeCurvature;
}

/// Scores that are given, or the softmax of a given gate.
struct GivenRouter : Router {
  Tensor scores, w_gate;
  RouterOutput forward(const Tensor& z, nn::ForwardContext&) override {
    if (!w_gate.defined()) return {scores, {}};
    const auto gating = noisy_top_k(z, w_gate, torch::zeros_like(w_gate), {}, w_gate.size(1));
    scores = gating.scores_UN;
    return {scores, balance_loss(gating, 0.01)};
  }
  void initialize(at::Generator&) override {}
};

/// A layer whose parameters are leaves of the case, under the names that begin with `prefix`.
std::shared_ptr<MergedLinear> layer_of(Case& c, MergedLinearOptions o, const std::string& prefix = "") {
  const bool curved = c.has(prefix + "C1_out"), has_bias = c.has(prefix + "b_m");
  o.num_experts = c[prefix + "E"].size(0);
  o.curvature_rank = curved ? c[prefix + "C1_out"].size(0) : 0;
  o.make_router = [](const RouterShape&) { return std::make_shared<GivenRouter>(); };
  auto layer = std::make_shared<MergedLinear>(
      LayerPlace{.weight_OI = c[prefix + "E_m"], .bias_O = has_bias ? c[prefix + "b_m"] : Tensor()}, o);
  layer->weight = c.leaf(prefix + "E_m");
  layer->experts = c.leaf(prefix + "E");
  if (curved) *layer->curvature = curvature_of(c, prefix);
  if (has_bias) {
    layer->bias = c.leaf(prefix + "b_m");
    layer->bias_experts = c.leaf(prefix + "b");
    layer->bias_curvature->c1_out = c.leaf(prefix + "Cb1");
    layer->bias_curvature->c2_out = c.leaf(prefix + "Cb2");
  }
  return layer;
}

GivenRouter& router_of(MergedLinear& layer) { return dynamic_cast<GivenRouter&>(*layer.router); }

void backward(const Tensor& loss, const std::vector<std::shared_ptr<MergedLinear>>& layers) {
  loss.backward();
  std::vector<Tensor> roots, gradients;
  for (const auto& layer : layers) layer->collect_backward(roots, gradients);
  if (!roots.empty()) torch::autograd::backward(roots, gradients);
}

void merged(Case& c) {
  // The absorbed form rests on scores that sum to 1, as every router's do.
  const bool sums_to_one = (c["scores"].sum(1) - 1.0).abs().max().item<double>() < 1e-12;
  tensor::RandomStreams random(1, at::kCPU);
  for (const auto form : {Form::kBase, Form::kAutomatic, Form::kAbsorbed}) {
    MergedLinearOptions o{.num_experts = 0, .alpha = c.param("alpha"), .mask = mask_of(c), .unit_mask = unit_mask_of(c),
                          .mask_order = order_of(c), .form = form, .scores_sum_to_one = sums_to_one};
    if (form == Form::kAbsorbed && !o.base_can_be_absorbed()) continue;
    const auto layer = layer_of(c, o);
    auto x = c.leaf("x"), scores = c.leaf("scores");
    router_of(*layer).scores = scores;
    nn::ForwardContext context{.training = true, .random = &random};
    layer->begin(true, &random);
    const auto y = layer->forward(x, context);
    c.check("y", y);
    if (c.has("bias_hat")) c.check("bias_hat", layer->forward(torch::zeros_like(x), context).select(1, 0));
    backward((y * c["gy"]).sum(), {layer});
    c.check_gradient("x", x);
    c.check_gradient("E", layer->experts);
    c.check_gradient("E_m", layer->weight);
    // In the absorbed form the scores' gradient holds <G, E_m> besides, the same for every expert: the softmax drops it.
    if (form == Form::kBase || !o.base_can_be_absorbed()) c.check_gradient("scores", scores);
    if (layer->curvature) check_factors(c, *layer->curvature);
    if (layer->bias_experts.defined()) {
      c.check_gradient("b_m", layer->bias);
      c.check_gradient("b", layer->bias_experts);
      c.check_gradient("Cb1", layer->bias_curvature->c1_out);
      c.check_gradient("Cb2", layer->bias_curvature->c2_out);
    }

    const torch::NoGradGuard no_grad;
    if (c.has("merged_weight")) {
      const auto mask = o.mask ? o.mask(layer->experts, layer->weight, true, &random) : EntryMask();
      const auto mixture = make_mixture(layer->weight, layer->experts, mask, layer->curvature.get(), o.alpha,
                                        o.base_can_be_absorbed() ? form : Form::kBase, o.mask_order);
      c.check("merged_weight", merge_weights(mixture, o.unit_mask ? scores * o.unit_mask(scores, random) : scores));
    }
    if (o.base_can_be_absorbed()) {
      // Evaluation folds the base in.
      layer->begin(false, nullptr);
      nn::ForwardContext evaluation;
      c.check("y", layer->forward(x, evaluation));
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
  const torch::NoGradGuard no_grad;
  for (const bool pool_padding : {false, true}) {
    const auto layer = layer_of(c, {.num_experts = 0, .alpha = c.param("alpha"), .pool_padding = pool_padding});
    router_of(*layer).w_gate = c["W_g"];
    nn::ForwardContext context;
    context.mask_BT = c["valid"];
    layer->begin(false, nullptr);
    const std::string profile = pool_padding ? "release" : "paper";
    c.check("y_" + profile, layer->forward(c["x"], context));
    c.check("scores_" + profile, router_of(*layer).scores);
  }
}

/// Whole recipes: each profile's own path where few experts are selected.
void topk_sparse(Case& c) {
  const torch::NoGradGuard no_grad;
  for (const std::string profile : {"paper", "release"}) {
    auto document = std::make_shared<io::JsonDocument>();
    document->value = {{"method", "camex"}, {"profile", profile}, {"num_experts", c.param<std::int64_t>("n")},
                       {"router", {{"top_k", c.param<std::int64_t>("k")}}}, {"curvature", {{"rank", c.param<std::int64_t>("r")}}}};
    const auto layer = std::dynamic_pointer_cast<MergedLinear>(
        ExpertOptions::read(io::JsonObject(document)).make_layer({c["E_m"]}));
    const bool base_free = profile == "release" && c.param<bool>("release_base_free");
    CHECK(layer->weight.defined() == !base_free);
    layer->experts.copy_(c["E"]);
    auto router_parameters = layer->router->named_parameters();
    router_parameters["w_gate"].copy_(c["W_g"]);
    router_parameters["w_noise"].zero_();
    if (!base_free) {
      layer->weight.copy_(c["E_m"]);
      *layer->curvature = curvature_of(c);
    }
    layer->begin(false, nullptr);
    nn::ForwardContext context;
    c.check("y_" + profile, layer->forward(c["x"], context));
    c.check("scores", layer->router->forward(masked_mean(c["x"], {}), context).scores_UN);
  }
}

void reparam(Case& c) {
  const auto curvature = curvature_of(c);
  const auto mask_function = mask_of(c);
  const auto mask = mask_function ? mask_function(c["E"], c["E_m"], false, nullptr) : EntryMask();
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

/// A whole recipe: what the released code starts from.
void upcycled(Case& c) {
  auto document = std::make_shared<io::JsonDocument>();
  document->value = {{"method", "camex"}, {"profile", "release"}, {"num_experts", c.param<std::int64_t>("n")},
                     {"protocol", c.param<std::string>("protocol")}, {"alpha", c.param("alpha")},
                     {"curvature", {{"rank", c.param<std::int64_t>("r")}}}};
  const auto layer = std::dynamic_pointer_cast<MergedLinear>(
      ExpertOptions::read(io::JsonObject(document)).make_layer({c["W"]}));
  auto generator = tensor::cpu_generator(1, "experts");
  layer->initialize(generator);
  auto x = c.leaf("x"), scores = c.leaf("scores");
  auto router = std::make_shared<GivenRouter>();
  router->scores = scores;
  layer->router = router;
  c.check("ties_mask", ties_mask((layer->experts - layer->weight).detach(), 1.0).to(at::kDouble));
  layer->begin(true, nullptr);
  nn::ForwardContext context;
  const auto y = layer->forward(x, context);
  c.check("y", y);
  backward((y * c["gy"]).sum(), {layer});
  c.check_gradient("x", x);
  c.check_gradient("scores", scores);
  c.check_gradient("E_m", layer->weight);
  c.check_gradient("E", layer->experts);
  check_factors(c, *layer->curvature);
}

void t5_ffn(Case& c) {
  const auto linear = [&](const std::string& name) {
    auto layer = layer_of(c, {.num_experts = 0, .alpha = c.param("alpha"), .mask = mask_of(c), .mask_order = order_of(c)},
                          name + ".");
    router_of(*layer).w_gate = c.leaf(name + ".W_g");
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
  backward((y * c["gy"]).sum(), {wi, wo});
  c.check_gradient("x", x);
  c.check_gradient("ln.weight", norm.weight);
  for (const auto& [name, layer] : {std::pair{"wi", wi}, std::pair{"wo", wo}}) {
    const std::string prefix = std::string(name) + ".";
    c.check("scores_" + std::string(name), router_of(*layer).scores);
    c.check_gradient(prefix + "E_m", layer->weight);
    c.check_gradient(prefix + "E", layer->experts);
    c.check_gradient(prefix + "W_g", router_of(*layer).w_gate);
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
    const auto n = row.at("n").get<std::int64_t>(), rank = row.at("rank").get<std::int64_t>();
    io::JsonObject none(std::make_shared<io::JsonDocument>(io::JsonDocument{.value = io::Json::object(), .file = {}, .origins = {}}));
    const MergedLinearOptions o{.num_experts = n, .curvature_rank = rank, .make_router = kNoisyTopK.configure(none, n, n).make};
    const auto make_layer = [o](const LayerPlace& place) { return std::make_shared<MergedLinear>(place, o); };
    const auto dense = row.at("dense").get<std::int64_t>();
    ParameterCounts counts;
    if (row.at("model") == "t5-base") {
      const io::Json config{{"model_type", "t5"}, {"vocab_size", 32128}, {"d_model", row["d"]}, {"d_kv", 64},
                            {"d_ff", row["d_ff"]}, {"num_layers", 12}, {"num_heads", 12}};
      backbones::BuildOptions build;
      build.tensors = at::TensorOptions(at::kMeta);
      const auto model = backbones::build(config, "t5-base", build);
      std::int64_t found = 0;
      for (const auto& item : model->named_parameters()) found += model->is_head(item.key()) ? 0 : item.value().numel();
      CHECK(found == dense);
      ExpertOptions options;
      options.method = "camex";
      options.make_layer = make_layer;
      auto generator = tensor::cpu_generator(0, "unused");
      counts = upcycle(model->feed_forwards(), options, generator).count();
    } else {
      // Two linears with biases a block: no backbone has them yet.
      const auto d = row.at("d").get<std::int64_t>(), d_ff = row.at("d_ff").get<std::int64_t>();
      for (const auto& [out, in] : {std::pair{d_ff, d}, std::pair{d, d_ff}}) {
        const auto blocks = row.at("blocks").get<std::int64_t>();
        const auto c = make_layer({.weight_OI = torch::empty({out, in}, at::kMeta), .bias_O = torch::empty({out}, at::kMeta)})->count();
        counts.experts += blocks * c.experts;
        counts.routers += blocks * c.routers;
        counts.curvature += blocks * c.curvature;
      }
    }
    CHECK(dense + counts.experts == row.at("with_experts_and_base").get<std::int64_t>());
    CHECK(counts.routers == row.at("routers").get<std::int64_t>());
    CHECK(counts.curvature == row.at("curvature").get<std::int64_t>());
    CHECK(dense + counts.experts + counts.routers + counts.curvature == row.at("total").get<std::int64_t>());
  }
}

struct Kind {
  const char* prefix;
  void (*check)(Case&);
};
// What is promised so far, in both profiles.
constexpr Kind kPromised[] = {
    {"kron_", kron},       {"merged_", merged}, {"router_naive_", router_naive}, {"sentence_padding_", sentence_padding},
    {"upcycled_", upcycled}, {"reparam_", reparam}, {"t5_ffn_", t5_ffn},         {"smoe_vanilla_", smoe_vanilla},
    {"topk_sparse_", topk_sparse},
};

// Promised by nobody yet.
constexpr std::string_view kLater[] = {"dynamic_", "segment_", "twin_", "router_stablemoe_", "router_xmoe_",
                                       "router_expert_choice_"};

}  // namespace

TEST_CASE("CAMEx equals the golden cases of both profiles", "[routing][golden]") {
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
    Case c(file);
    kind->check(c);
    test::log_golden("camex/" + name, fmt::format("ok, largest error {:.1e}", c.largest));
  }
}
