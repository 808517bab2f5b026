#include <torch/torch.h>

#include "backbones/t5.h"
#include "routing/merged_linear.h"
#include "routing/method.h"
#include "routing/smear.h"
#include "routing/smoe_linear.h"
#include "support/catch.h"
#include "support/tensors.h"

// What recipes choose between: profiles and their switches, soft merging, sharing, biases. Everything in float64.

using namespace mergex;
using namespace mergex::routing;
using test::require_close;
using test::seeded_normal;

namespace {

constexpr test::Tolerance kClose{1e-9, 1e-11};

struct Read {
  ExpertOptions options;
  io::Json resolved;
};

Read read(const std::string& text) {
  auto document = std::make_shared<io::JsonDocument>();
  document->value = io::parse_json(text, "r.json");
  document->file = "r.json";
  auto resolved = std::make_shared<io::Json>();
  auto options = ExpertOptions::read(io::JsonObject(document, resolved));
  return {std::move(options), *resolved};
}

std::shared_ptr<MergedLinear> layer_of(const std::string& text, const LayerPlace& place, std::uint64_t seed = 1) {
  auto layer = std::dynamic_pointer_cast<MergedLinear>(read(text).options.make_layer(place));
  REQUIRE(layer != nullptr);
  auto generator = tensor::cpu_generator(seed, "experts");
  layer->initialize(generator);
  return layer;
}

/// Every parameter away from where it starts.
void stir(const torch::nn::Module& module, double by = 0.3) {
  const torch::NoGradGuard no_grad;
  std::uint64_t seed = 1000;
  for (const auto& p : module.parameters()) p.add_(by * seeded_normal(p.sizes(), seed++));
}

std::shared_ptr<backbones::Backbone> small_t5() {
  const io::Json config{{"model_type", "t5"}, {"vocab_size", 60}, {"d_model", 12}, {"d_kv", 4}, {"d_ff", 18},
                        {"num_layers", 3},    {"num_heads", 3},   {"feed_forward_proj", "gated-gelu"}};
  backbones::BuildOptions build;
  build.tensors = at::TensorOptions(at::kDouble);
  auto model = backbones::build(config, "small", build);
  auto generator = tensor::cpu_generator(1, "weights");
  model->initialize(generator, std::nullopt);
  return model;
}

ExpertSet upcycle_with(const std::shared_ptr<backbones::Backbone>& model, const std::string& text) {
  auto generator = tensor::cpu_generator(2, "experts");
  return upcycle(model->feed_forwards(), read(text).options, generator);
}

MergedLinear& merged(const ExpertSet& set, std::size_t place) {
  return dynamic_cast<MergedLinear&>(*set.places()[place].layer);
}

backbones::Inputs sentences(std::int64_t padding = 0) {
  auto ids = torch::tensor({{7, 8, 9, 10, 1}, {11, 12, 1, 0, 0}}, at::kLong);
  if (padding > 0) ids = torch::cat({ids, torch::zeros({2, padding}, at::kLong)}, 1);
  return {ids, (ids != 0).to(at::kLong), {}};
}

Tensor evaluate(backbones::Backbone& model, ExpertSet& set, const backbones::Inputs& inputs) {
  const torch::NoGradGuard no_grad;
  set.begin(false, nullptr);
  nn::ForwardContext context;
  return model.forward(inputs, context);
}

/// A feed-forward whose linears have biases.
struct BiasedFeedForward : nn::FeedForward {
  BiasedFeedForward() {
    for (const auto& [name, in, out] : {std::tuple{"c_fc", 6, 8}, std::tuple{"c_proj", 8, 6}}) {
      auto linear = std::make_shared<nn::Linear>(in, out, at::kDouble, /*has_bias=*/true);
      const torch::NoGradGuard no_grad;
      linear->weight.copy_(seeded_normal({out, in}, 5));
      linear->bias.copy_(seeded_normal({out}, 6));
      slots[name] = register_module(name, linear);
    }
  }
  Tensor forward(const Tensor& x, nn::ForwardContext& context) override {
    return slots["c_proj"]->forward(torch::relu(slots["c_fc"]->forward(x, context)), context);
  }
  std::vector<std::string> projection_names() const override { return {"c_fc", "c_proj"}; }
  std::shared_ptr<nn::Projection>& projection(const std::string& name) override { return slots.at(name); }
  std::map<std::string, std::shared_ptr<nn::Projection>> slots;
};

}  // namespace

TEST_CASE("a profile is a set of defaults, each of which a recipe can set by itself", "[routing]") {
  const auto experts = [](const std::string& more) {
    return read(R"({"method": "camex", "curvature": {}, "protocol": "dare")" + more + "}").resolved;
  };
  const auto paper = experts(""), release = experts(R"(, "profile": "release")");
  const io::Json same{{"alpha", 1.0}, {"dare_p", 0.1}, {"auxiliary_loss", 0.0}, {"router_scope", "per_linear"},
                      {"share_curvature_across_layers", false}};
  for (const auto& [key, value] : same.items()) {
    INFO(key);
    CHECK(paper.at(key) == value);
    CHECK(release.at(key) == value);
  }
  CHECK(paper.at("curvature") == io::Json{{"rank", 1}, {"rank_init", "identity_total"}, {"kernel", "automatic"}});
  CHECK(release.at("curvature") == io::Json{{"rank", 8}, {"rank_init", "identity_each_sum"}, {"kernel", "automatic"}});
  const std::map<std::string, std::pair<std::string, std::string>> differences{
      {"mask_order", {"before_curvature", "after_curvature"}},
      {"dare_mode", {"elementwise", "expert_channel"}},
      {"pool_padding", {"exclude", "include"}},
      {"topk_sparse_path", {"sparse_scores", "base_free"}}};
  for (const auto& [key, values] : differences) {
    INFO(key);
    CHECK(paper.at(key) == values.first);
    CHECK(release.at(key) == values.second);
    CHECK(experts(fmt::format(R"(, "{}": "{}")", key, values.second)).at(key) == values.second);
    CHECK(experts(fmt::format(R"(, "profile": "release", "{}": "{}")", key, values.first)).at(key) == values.first);
  }
  CHECK(paper.at("router").at("noise_std_floor") == 0.01);
  CHECK(read(R"({"method": "camex", "protocol": "ties", "profile": "release"})").resolved.at("ties_density") == 1.0);
  CHECK(read(R"({"method": "smoe"})").resolved.at("auxiliary_loss") == 0.01);
  CHECK(read(R"({"method": "smoe", "profile": "release"})").resolved.at("auxiliary_loss") == 0.0);

  // A resolved section says it all: under the other profile's name it is the same.
  auto renamed = release;
  renamed["profile"] = "paper";
  auto again = read(renamed.dump()).resolved;
  CHECK(again == renamed);
}

TEST_CASE("the noise floor is what is left of the noise where its learned part vanishes", "[routing][law]") {
  const auto scores = [](double floor) {
    auto layer = layer_of(fmt::format(R"({{"method": "camex", "num_experts": 3, "router": {{"noise_std_floor": {}}}}})", floor),
                          {seeded_normal({4, 6}, 1)});
    layer->router->named_parameters()["w_noise"].detach().fill_(-100.0);  // softplus(-600) is 0
    tensor::RandomStreams random(3, at::kCPU);
    nn::ForwardContext noisy{.training = true, .random = &random}, clean;
    const auto z = torch::ones({2, 6}, at::kDouble);
    return std::pair{layer->router->forward(z, noisy).scores_UN, layer->router->forward(z, clean).scores_UN};
  };
  const auto [none, clean] = scores(0.0);
  CHECK(torch::equal(none, clean));
  CHECK((scores(2.0).first - clean).abs().max().item<double>() > 0.01);
}

TEST_CASE("padding in the mean: results depend on it, the options say so, and only then", "[routing][law]") {
  const auto including = std::string(R"({"method": "camex", "num_experts": 3, "pool_padding": "include"})");
  CHECK(read(including).options.depends_on_padding);
  CHECK(read(R"({"method": "soft_merge", "profile": "release"})").options.depends_on_padding);
  CHECK(!read(R"({"method": "camex"})").options.depends_on_padding);
  CHECK(!read(R"({"method": "smoe", "profile": "release"})").options.depends_on_padding);

  const auto model = small_t5();
  auto set = upcycle_with(model, including);
  stir(*model);
  CHECK(test::compare(evaluate(*model, set, sentences(4)), evaluate(*model, set, sentences()), {1e-3, 1e-3}).worst > 1.0);
}

TEST_CASE("every form, product and kernel gives the same numbers, at odd sizes and at T5-small's", "[routing][law]") {
  const auto [out, in] = GENERATE(table<std::int64_t, std::int64_t>({{2048, 512}, {7, 13}}));
  const std::string order = GENERATE("before_curvature", "after_curvature");
  std::map<std::string, std::vector<Tensor>> found;
  struct Path {
    const char *form, *product, *kernel;
  };
  for (const auto& path : {Path{"base", "merged", "contraction"}, Path{"absorbed", "merged", "contraction"},
                           Path{"base", "activations", "contraction"}, Path{"base", "tiled", "fused"},
                           Path{"absorbed", "tiled", "fused"}, Path{"automatic", "automatic", "automatic"}}) {
    const auto layer = layer_of(fmt::format(R"({{"method": "camex", "num_experts": 3, "protocol": "ties", "alpha": 0.7, "curvature": {{"kernel": "{}"}}, "mask_order": "{}", "form": "{}", "product": "{}"}})",
                                            path.kernel, order, path.form, path.product),
                                {0.05 * seeded_normal({out, in}, 1)});
    {
      const torch::NoGradGuard no_grad;
      layer->experts.add_(0.01 * seeded_normal(layer->experts.sizes(), 2));
      layer->curvature->c2_out.add_(0.1 * seeded_normal(layer->curvature->c2_out.sizes(), 3));
    }
    const auto x = seeded_normal({3, 5, in}, 4);
    nn::ForwardContext context;  // no noise
    layer->begin(true, nullptr);
    const auto y = layer->forward(x, context);
    y.square().sum().backward();
    std::vector<Tensor> roots, gradients;
    layer->collect_backward(roots, gradients);
    torch::autograd::backward(roots, gradients);
    layer->begin(false, nullptr);
    const torch::NoGradGuard no_grad;
    found[fmt::format("{} {} {}", path.form, path.product, path.kernel)] = {y.detach(), layer->forward(x, context), layer->experts.grad(), layer->weight.grad(),
                   layer->curvature->c1_in.grad(), layer->router->named_parameters()["w_gate"].grad()};
  }
  // In float32 the router's gradient differs more: the absorbed form adds <G, E_m>, far above the <G, gamma_i> that tell
  // the experts apart, to every score's.
  const auto& plain = found["base merged contraction"];
  for (const auto& [path, numbers] : found) {
    INFO(path);
    test::require_gradient("training", numbers[0], plain[0], 1e-11, 0.0);
    test::require_gradient("evaluation", numbers[1], plain[0], 1e-11, 0.0);
    for (std::size_t i = 2; i < 6; ++i) test::require_gradient("gradient", numbers[i], plain[i], 1e-9, 0.0);
  }
}

TEST_CASE("soft merging is the score-weighted mean of the experts, and has no base", "[routing][law]") {
  const std::string text = GENERATE(R"({"method": "soft_merge", "num_experts": 4})",
                                    R"({"method": "soft_merge", "num_experts": 4, "router": {"kind": "noisy_top_k", "top_k": 2}})",
                                    R"({"method": "camex", "num_experts": 5, "topk_sparse_path": "base_free", "router": {"top_k": 2}, "protocol": "ties", "alpha": 0.3, "curvature": {}})");
  const auto layer = layer_of(text, {seeded_normal({6, 8}, 1)});
  stir(*layer);
  CHECK(!layer->weight.defined());
  CHECK(layer->curvature == nullptr);
  const torch::NoGradGuard no_grad;
  const auto x = seeded_normal({3, 5, 8}, 2);
  layer->begin(false, nullptr);
  nn::ForwardContext context;
  const auto y = layer->forward(x, context);
  const auto scores = layer->router->forward(x.mean(1), context).scores_UN;
  auto expected = torch::zeros_like(y);
  for (std::int64_t i = 0; i < scores.size(1); ++i) {
    expected += scores.select(1, i).view({-1, 1, 1}) * torch::matmul(x, layer->experts[i].t());
  }
  require_close("y", y, expected, kClose);
  require_close("dense weight", layer->dense_weight(), layer->experts.mean(0), kClose);
  CHECK(layer->count().experts == (layer->experts.size(0) - 1) * 48);
  CHECK(layer->report().task_vector_ratio > 0.0);
}

TEST_CASE("domain-specific merging at alpha 1 is soft merging with the same router", "[routing][law]") {
  const LayerPlace place{seeded_normal({6, 8}, 1)};
  const auto router = std::string(R"("num_experts": 3, "router": {"kind": "smear"})");
  const auto camex = layer_of(R"({"method": "camex", )" + router + "}", place);
  const auto soft = layer_of(R"({"method": "soft_merge", )" + router + "}", place);
  const torch::NoGradGuard no_grad;
  for (const auto& layer : {camex, soft}) {
    layer->experts.add_(seeded_normal({3, 6, 8}, 7));
    layer->begin(false, nullptr);
  }
  nn::ForwardContext context;
  const auto x = seeded_normal({3, 5, 8}, 2);
  require_close("y", camex->forward(x, context), soft->forward(x, context), kClose);
}

TEST_CASE("SMEAR's scores do not depend on the size of input or router weights", "[routing][law]") {
  const auto z = seeded_normal({5, 16}, 1), w = seeded_normal({16, 3}, 2);
  const auto ones = torch::ones({16}, at::kDouble), zeros = torch::zeros({16}, at::kDouble);
  const auto scores = normalized_scores(z, w, ones, zeros, 0.1 * ones, zeros);
  require_close("sum", scores.sum(1), torch::ones({5}, at::kDouble), kClose);
  // Up to the epsilon of the norms.
  require_close("input", normalized_scores(50.0 * z, w, ones, zeros, 0.1 * ones, zeros), scores, {1e-4, 1e-4});
  require_close("weights", normalized_scores(z, 50.0 * w + 3.0, ones, zeros, 0.1 * ones, zeros), scores, {1e-4, 1e-4});
  // By the definition, for one unit and one expert.
  const auto normed = [](const Tensor& t) { return (t - t.mean()) / (t.var(/*unbiased=*/false) + 1e-5).sqrt(); };
  std::vector<Tensor> logits;
  for (int i = 0; i < 3; ++i) logits.push_back((normed(z[2]) * 0.1 * normed(w.select(1, i))).sum());
  require_close("definition", scores[2], torch::softmax(torch::stack(logits), 0), kClose);
}

TEST_CASE("expert dropout: what is left is scaled up or not, a unit without experts is uniform, evaluation keeps all", "[routing][law]") {
  const auto scores = torch::softmax(seeded_normal({3, 4}, 1), -1);
  const auto kept = torch::tensor({{1.0, 0.0, 1.0, 1.0}, {0.0, 0.0, 0.0, 0.0}, {0.0, 1.0, 0.0, 0.0}}, at::kDouble);
  const auto plain = drop_experts(scores, kept, false);
  CHECK(torch::equal(plain, scores * kept));
  const auto scaled = drop_experts(scores, kept, true);
  require_close("sum", scaled.sum(1), torch::ones({3}, at::kDouble), kClose);
  require_close("ratios", scaled[0], plain[0] / plain[0].sum(), kClose);
  require_close("none left", scaled[1], torch::full({4}, 0.25, at::kDouble), kClose);
  auto leaf = scores.clone().set_requires_grad(true);
  drop_experts(leaf, kept, true).square().sum().backward();
  CHECK(leaf.grad().isfinite().all().item<bool>());

  const auto layer = layer_of(R"({"method": "soft_merge", "num_experts": 6, "router": {"expert_dropout": 0.5, "renormalize": false}})",
                              {seeded_normal({4, 8}, 1)});
  tensor::RandomStreams random(3, at::kCPU);
  nn::ForwardContext training{.training = true, .random = &random}, evaluation;
  const auto z = seeded_normal({200, 8}, 5);
  const auto dropped = (layer->router->forward(z, training).scores_UN == 0).to(at::kDouble).mean().item<double>();
  CHECK(dropped == Approx(0.5).margin(5.0 * 0.5 / std::sqrt(1200.0)));
  CHECK((layer->router->forward(z, evaluation).scores_UN > 0).all().item<bool>());
}

TEST_CASE("scores that do not sum to 1 keep the base apart while training", "[routing][law]") {
  const auto layer = layer_of(R"({"method": "camex", "num_experts": 3, "router": {"kind": "smear", "expert_dropout": 0.9, "renormalize": false}})",
                              {seeded_normal({4, 8}, 1)});
  tensor::RandomStreams random(3, at::kCPU);
  layer->begin(true, &random);
  nn::ForwardContext context{.training = true, .random = &random};
  const auto x = seeded_normal({5, 2, 8}, 2);
  // Experts equal to the base: the base's own output, however many are dropped.
  require_close("y", layer->forward(x, context), torch::matmul(x, layer->weight.t()), kClose);
}

TEST_CASE("MEO's token level: an adapter of width / 64 in front, the identity at the start", "[routing][law]") {
  const LayerPlace place{seeded_normal({6, 128}, 1)};
  const auto text = [](const char* level) {
    return fmt::format(R"({{"method": "soft_merge", "num_experts": 3, "router": {{"kind": "noisy_top_k", "level": "{}"}}}})", level);
  };
  const auto token = layer_of(text("token"), place), sequence = layer_of(text("sequence"), place);
  CHECK(sequence->token_adapter == nullptr);
  CHECK(token->token_adapter->down->weight.sizes() == at::IntArrayRef({2, 128}));
  CHECK(token->count().routers == sequence->count().routers + 2 * 128 + 2 + 128 * 2 + 128);
  const torch::NoGradGuard no_grad;
  const auto x = seeded_normal({2, 4, 128}, 2);
  nn::ForwardContext context;
  for (const auto& layer : {token, sequence}) {
    layer->experts.copy_(sequence->experts + seeded_normal({3, 6, 128}, 9));
    layer->begin(false, nullptr);
  }
  token->router->named_parameters()["w_gate"].copy_(sequence->router->named_parameters()["w_gate"]);
  require_close("identity", token->forward(x, context), sequence->forward(x, context), kClose);
  stir(*token->token_adapter, 0.1);
  const auto adapted = x + torch::linear(torch::relu(torch::linear(x, token->token_adapter->down->weight, token->token_adapter->down->bias)),
                                         token->token_adapter->up->weight, token->token_adapter->up->bias);
  // Gate and experts both read the adapted tokens.
  require_close("adapted", token->forward(x, context), sequence->forward(adapted, context), kClose);
}

TEST_CASE("one router for each feed-forward: the first linear routes, the others take its scores", "[routing][law]") {
  const auto model = small_t5();
  auto set = upcycle_with(model, R"({"method": "camex", "num_experts": 3, "router_scope": "per_ffn", "auxiliary_loss": 0.01})");
  std::size_t routers = 0;
  for (std::size_t i = 0; i < set.places().size(); ++i) {
    CHECK((merged(set, i).router != nullptr) == (i % 3 == 0));  // wi_0 of wi_0, wi_1, wo
    routers += merged(set, i).router != nullptr ? 1 : 0;
  }
  CHECK(routers == 6);
  CHECK(set.count().routers == 6 * 2 * 12 * 3);
  stir(*model);
  const torch::NoGradGuard no_grad;
  set.begin(false, nullptr);
  nn::ForwardContext context;
  model->forward(sentences(), context);
  CHECK(context.auxiliary_losses.size() == 6);
  for (std::size_t i = 0; i < set.places().size(); i += 3) {
    const auto entropy = set.places()[i].layer->report().router_entropy;
    CHECK(set.places()[i + 2].layer->report().router_entropy == entropy);
  }
  // Alone among experts, a linear routes itself.
  const auto other = small_t5();
  CHECK(merged(upcycle_with(other, R"({"method": "camex", "linears": ["wo"], "router_scope": "per_ffn"})"), 0).router != nullptr);
}

TEST_CASE("one curvature for each role and stack: shared, counted once, its gradient the sum over layers", "[routing][law]") {
  const auto text = [](bool share) {
    return fmt::format(R"({{"method": "camex", "num_experts": 2, "protocol": "ties", "curvature": {{"rank": 2}}, "share_curvature_across_layers": {}}})", share);
  };
  const auto shared_model = small_t5(), own_model = small_t5();
  auto shared = upcycle_with(shared_model, text(true)), own = upcycle_with(own_model, text(false));
  CHECK(own.count().curvature == 3 * shared.count().curvature);  // 3 layers a stack
  for (std::size_t i = 0; i < 9; ++i) {
    CHECK(merged(shared, i).curvature == merged(shared, i % 3).curvature);
    CHECK(merged(shared, i).curvature != merged(shared, i + 9).curvature);  // the decoder's
  }
  CHECK(merged(shared, 0).curvature != merged(shared, 1).curvature);  // wi_0, wi_1

  // Every parameter once; the same values in both models, wherever they live.
  std::set<const void*> seen;
  for (const auto& item : shared_model->named_parameters()) {
    INFO(item.key());
    CHECK(seen.insert(item.value().unsafeGetTensorImpl()).second);
  }
  const auto factors = [](Curvature& c) { return std::vector<Tensor>{c.c1_out, c.c2_out, c.c1_in, c.c2_in}; };
  {
    const torch::NoGradGuard no_grad;
    std::uint64_t seed = 50;
    auto own_parameters = own_model->named_parameters();
    for (const auto& item : shared_model->named_parameters()) {
      item.value().add_(0.1 * seeded_normal(item.value().sizes(), seed++));
      own_parameters[item.key()].copy_(item.value());
    }
    for (std::size_t i = 0; i < own.places().size(); ++i) {
      const auto from = factors(*merged(shared, i).curvature), to = factors(*merged(own, i).curvature);
      for (std::size_t f = 0; f < 4; ++f) to[f].copy_(from[f]);
    }
  }
  for (auto* pair : {&shared, &own}) {
    const auto& model = pair == &shared ? shared_model : own_model;
    pair->begin(true, nullptr);
    nn::ForwardContext context;
    model->forward(sentences(), context).square().sum().backward();
    pair->finish_backward();
  }
  for (std::size_t i = 0; i < 3; ++i) {
    const auto total = factors(*merged(shared, i).curvature);
    for (std::size_t f = 0; f < 4; ++f) {
      Tensor sum;
      for (std::size_t at = i; at < 9; at += 3) {
        const auto gradient = factors(*merged(own, at).curvature)[f].grad();
        sum = sum.defined() ? sum + gradient : gradient;
      }
      require_close("gradient", total[f].grad(), sum, {1e-8, 1e-10});
      CHECK(sum.abs().max().item<double>() > 0.0);
    }
  }
}

TEST_CASE("a linear with a bias: upcycled it computes what it computed, and the bias is merged with the weight", "[routing][law]") {
  const std::string text = GENERATE(
      R"({"method": "camex", "num_experts": 3, "protocol": "ties", "curvature": {"rank": 2}, "alpha": 0.8})",
      R"({"method": "camex", "profile": "release", "num_experts": 3, "protocol": "dare", "curvature": {}})",
      R"({"method": "camex", "num_experts": 3, "protocol": "dare", "share_curvature_across_layers": true, "curvature": {}})",
      R"({"method": "soft_merge", "num_experts": 3})", R"({"method": "smoe", "num_experts": 3})");
  INFO(text);
  const auto block = std::make_shared<BiasedFeedForward>(), next = std::make_shared<BiasedFeedForward>();
  const auto x = seeded_normal({2, 5, 6}, 3);
  nn::ForwardContext dense_context;
  const auto dense = block->forward(x, dense_context).detach();
  const Tensor dense_bias = dynamic_cast<nn::Linear&>(*block->slots["c_fc"]).bias;
  auto generator = tensor::cpu_generator(2, "experts");
  auto set = upcycle({{"h.0.mlp", block, false, "h"}, {"h.1.mlp", next, false, "h"}}, read(text).options, generator);
  require_close("dense bias", set.places()[0].layer->dense_bias(), dense_bias, kClose);
  for (const bool training : {true, false}) {
    tensor::RandomStreams random(3, at::kCPU);
    set.begin(training, &random);
    nn::ForwardContext context{.training = training, .random = &random};
    const auto y = block->forward(x, context);
    require_close("y", y, dense, kClose);
    if (!training) break;
    y.square().sum().backward();
    set.finish_backward();
    auto parameters = block->named_parameters();
    CHECK(parameters["c_fc.bias_experts"].grad().abs().max().item<double>() > 0.0);
  }
}

TEST_CASE("two experts with equal weights and other biases give the mean of their biases", "[routing][law]") {
  const LayerPlace place{.weight_OI = seeded_normal({6, 8}, 1), .bias_O = seeded_normal({6}, 2)};
  const std::string text = GENERATE(R"({"method": "soft_merge", "num_experts": 2})", R"({"method": "camex", "num_experts": 2})",
                                    R"({"method": "smoe", "num_experts": 2})");
  const auto layer = read(text).options.make_layer(place);
  const torch::NoGradGuard no_grad;
  for (const auto& item : layer->named_parameters()) {
    if (item.key().starts_with("router.")) item.value().zero_();  // uniform scores
  }
  auto parameters = layer->named_parameters();
  const auto biases = seeded_normal({2, 6}, 5);
  parameters["bias_experts"].copy_(biases);
  layer->begin(false, nullptr);
  nn::ForwardContext context;
  const auto x = seeded_normal({3, 4, 8}, 6);
  require_close("y", layer->forward(x, context), torch::linear(x, place.weight_OI, biases.mean(0)), kClose);
}
