#include "io/adapter_folder.h"

#include <fmt/format.h>

#include <cmath>

#include "support/adapters.h"
#include "support/catch.h"
#include "support/paths.h"

using namespace mergex;
using io::AdapterFolder;
using io::Json;
using test::NamedValues;
using test::random_values;
namespace fs = std::filesystem;

namespace {

Json config(const char* more = "{}") {
  Json json{{"peft_type", "LORA"}, {"r", 2}, {"lora_alpha", 4}};
  json.update(Json::parse(more));
  return json;
}

NamedValues factors(const std::string& module, std::int64_t rank = 2) {
  return {{module + ".lora_A.weight", random_values({rank, 4}, 1)}, {module + ".lora_B.weight", random_values({3, rank}, 2)}};
}

NamedValues joined(NamedValues a, const NamedValues& b) {
  a.insert(b.begin(), b.end());
  return a;
}

AdapterFolder written(const fs::path& folder, const Json& json, const NamedValues& tensors) {
  test::write_adapter_folder(folder, json, tensors);
  return AdapterFolder(folder);
}

std::string fault_of(const Json& json, const NamedValues& tensors) {
  test::TemporaryFolder temporary;
  test::write_adapter_folder(temporary / "a", json, tensors);
  const auto message = test::user_error([&] { AdapterFolder(temporary / "a"); });
  CHECK(message.find('\n') == std::string::npos);
  CHECK(message.starts_with((temporary / "a").string()));
  return message.substr((temporary / "a").string().size());
}

}  // namespace

TEST_CASE("scalings follow r, alpha, their patterns and rsLoRA", "[io]") {
  test::TemporaryFolder temporary;
  const auto tensors = joined(joined(factors("model.layers.0.q", 2), factors("model.layers.1.q", 3)),
                              joined(factors("model.layers.10.q", 2), factors("head_q", 2)));
  const auto scaling = [&](const char* more) {
    const auto adapter = written(temporary / "a", config(more), tensors);
    std::map<std::string, double> result;
    for (const auto& module : adapter.modules()) result[module.name] = module.scaling;
    return result;
  };
  using Scalings = std::map<std::string, double>;
  // A key is the end of a name, at a dot; a literal dot of the key stands for any character, as in a regular expression.
  CHECK(scaling(R"({"rank_pattern": {"layers.1.q": 3}})") ==
        Scalings{{"model.layers.0.q", 2.0}, {"model.layers.1.q", 4.0 / 3}, {"model.layers.10.q", 2.0}, {"head_q", 2.0}});
  CHECK(scaling(R"({"rank_pattern": {"^model\\.layers\\.1\\.q": 3}, "alpha_pattern": {"q": 1, "layers.0.q": 9}})") ==
        Scalings{{"model.layers.0.q", 0.5}, {"model.layers.1.q", 1.0 / 3}, {"model.layers.10.q", 0.5}, {"head_q", 2.0}});
  CHECK(scaling(R"({"rank_pattern": {"model.*[1-9]\\.q": 3, ".*q": 2}, "alpha_pattern": {"layers\\.(0|10)\\.q": 6}})") ==
        Scalings{{"model.layers.0.q", 3.0}, {"model.layers.1.q", 4.0 / 3}, {"model.layers.10.q", 3.0}, {"head_q", 2.0}});
  CHECK(scaling(R"({"rank_pattern": {"1.q": 3}, "use_rslora": true})") ==
        Scalings{{"model.layers.0.q", 4 / std::sqrt(2.0)},
                 {"model.layers.1.q", 4 / std::sqrt(3.0)},
                 {"model.layers.10.q", 4 / std::sqrt(2.0)},
                 {"head_q", 4 / std::sqrt(2.0)}});
}

TEST_CASE("configs of several PEFT versions are understood", "[io]") {
  test::TemporaryFolder temporary;
  // 0.2: few keys, nulls; later ones: more, of which those that are off do no harm.
  const auto old = written(temporary / "old", Json::parse(R"({"base_model_name_or_path": "x", "bias": "none", "enable_lora": null,
    "fan_in_fan_out": false, "inference_mode": true, "lora_alpha": 4, "lora_dropout": 0.05, "merge_weights": false,
    "modules_to_save": null, "peft_type": "LORA", "r": 2, "target_modules": ["q"], "task_type": "CAUSAL_LM"})"),
                           joined(factors("q"), {}));
  CHECK(old.modules().size() == 1);
  const auto recent = written(temporary / "new", config(R"({"some_later_option": null, "another": {}, "third": false,
    "init_lora_weights": "gaussian", "megatron_core": "megatron.core", "qalora_group_size": 16, "lora_alpha": 4.5})"),
                              factors("q"));
  CHECK(recent.modules()[0].scaling == 2.25);
  CHECK(recent.bias() == "none");
}

TEST_CASE("whole tensors are those that the config names", "[io]") {
  test::TemporaryFolder temporary;
  const auto one = [](const char* name) { return NamedValues{{name, random_values({3}, 5)}}; };
  const auto names = [&](const char* more, const char* tensor) {
    const auto adapter = written(temporary / "a", config(more), joined(factors("layers.0.q"), one(tensor)));
    REQUIRE(adapter.replaced().size() == 1);
    return adapter.replaced().begin()->first;
  };
  CHECK(names(R"({"bias": "all"})", "norm.bias") == "norm.bias");
  CHECK(names(R"({"bias": "lora_only"})", "layers.0.q.base_layer.bias") == "layers.0.q.bias");
  CHECK(names(R"({"bias": "lora_only"})", "layers.0.q.bias") == "layers.0.q.bias");
  CHECK(names(R"({"modules_to_save": ["classifier"]})", "classifier.dense.weight") == "classifier.dense.weight");
  CHECK(names(R"({"modules_to_save": ["score"]})", "score.modules_to_save.weight") == "score.weight");
  CHECK(names("{}", "model.embed_tokens.weight") == "model.embed_tokens.weight");
}

TEST_CASE("what is no LoRA adapter is refused in one line", "[io]") {
  const auto q = factors("q");
  CHECK(fault_of(config(R"({"peft_type": "IA3"})"), q) ==
        "/adapter_config.json#/peft_type: got \"IA3\", expected \"LORA\"; merge it into its base with PEFT (merge_and_unload)");
  CHECK(fault_of(Json{{"r", 2}}, q) == "/adapter_config.json: \"peft_type\" is missing; add it");
  CHECK(fault_of(config(R"({"alora_invocation_tokens": [1, 2]})"), q).starts_with(
      "/adapter_config.json#/alora_invocation_tokens: got [1,2], an activated LoRA acts on some tokens only"));
  CHECK(fault_of(config(R"({"init_lora_weights": "pissa_niter_16"})"), q).starts_with(
      "/adapter_config.json#/init_lora_weights: got \"pissa_niter_16\", a start that changes the base"));
  CHECK(fault_of(config(R"({"use_xdora": true})"), q).starts_with("/adapter_config.json: unknown key \"use_xdora\""));
  CHECK(fault_of(config(R"({"r": 0})"), q).starts_with("/adapter_config.json#/r: got 0, expected 1.."));
  CHECK(fault_of(config(R"({"bias": "some"})"), q).starts_with("/adapter_config.json#/bias: got \"some\""));
  CHECK(fault_of(config(R"({"rank_pattern": {"q": 1.5}})"), q) ==
        "/adapter_config.json#/rank_pattern/q: got 1.5, expected a rank of at least 1");
  CHECK(fault_of(config(R"({"alpha_pattern": {"(q": 1}})"), q) ==
        "/adapter_config.json#/alpha_pattern: cannot read the pattern \"(q\"; list the modules instead");
  CHECK(fault_of(config(R"({"alpha_pattern": {"q{2000}": 1}})"), q).find("counts repetitions") != std::string::npos);
  // What would take for ever in a backtracking matcher.
  CHECK(fault_of(config(R"({"alpha_pattern": {"(a|aa)+(b|bb)*(a*a*)*c": 1}})"), factors(std::string(300, 'a'), 1))
            .find("has rank 1, expected 2") != std::string::npos);

  const std::string weights = "/adapter_model.safetensors: ";
  CHECK(fault_of(config(), factors("q", 3)) ==
        weights + "module \"q\" has rank 3, expected 2 by r and rank_pattern of adapter_config.json; take both files from the "
                  "same adapter");
  CHECK(fault_of(config(), {{"q.lora_A.weight", random_values({2, 4}, 1)}}) ==
        weights + "module \"q\" has no lora_B; save the adapter again");
  CHECK(fault_of(config(), {{"q.lora_A.weight", random_values({2, 4}, 1)}, {"q.lora_B.weight", random_values({3, 1}, 1)}}) ==
        weights + "module \"q\": A is [2, 4] and B is [3, 1], expected [rank, in] and [out, rank]; save the adapter again");
  CHECK(fault_of(config(), {{"c.lora_A.weight", random_values({2, 4, 1, 1}, 1)}, {"c.lora_B.weight", random_values({3, 2}, 1)}}) ==
        weights + "tensor \"base_model.model.c.lora_A.weight\" is [2, 4, 1, 1], expected a matrix; adapters of convolutions and of "
                  "experts are not supported");
  CHECK(fault_of(config(), {{"q.lora_A.weight", random_values({2, 0}, 1)}, {"q.lora_B.weight", random_values({3, 2}, 1)}}) ==
        weights + "tensor \"base_model.model.q.lora_A.weight\" is empty [2, 0]; gather its parts before saving (ZeRO-3, FSDP)");
  CHECK(fault_of(config(), joined(q, {{"norm.weight", random_values({4}, 1)}}))
            .starts_with(weights + "tensor \"base_model.model.norm.weight\" is no part of a LoRA adapter"));
  CHECK(fault_of(config(), joined(q, {{"norm.bias", random_values({4}, 1)}})).find("is no part of") != std::string::npos);
  CHECK(fault_of(config(R"({"bias": "lora_only"})"), joined(q, {{"norm.bias", random_values({4}, 1)}})).find("is no part of") !=
        std::string::npos);
  CHECK(fault_of(config(), joined(q, {{"q.lora_magnitude_vector", random_values({3}, 1)}})) ==
        weights + "module \"q\" has a lora_magnitude_vector, but use_dora of adapter_config.json is false; take both files from the "
                  "same adapter");
  CHECK(fault_of(config(R"({"use_dora": true})"), q).find("has no lora_magnitude_vector, but use_dora of") != std::string::npos);
  CHECK(fault_of(config(R"({"use_dora": true})"), joined(q, {{"q.lora_magnitude_vector", random_values({5}, 1)}}))
            .ends_with("is [5], expected 3 values, one per output of \"q\""));
  CHECK(fault_of(config(R"({"lora_bias": true})"), q).find("has no lora_B.bias, but lora_bias of") != std::string::npos);
  CHECK(fault_of(config(), {}) == weights + "holds no tensor; save the adapter again");
}

TEST_CASE("a folder that is no adapter is refused in one line", "[io]") {
  test::TemporaryFolder temporary;
  const auto folder = temporary / "a";
  const auto fault = [&] {
    return test::user_error([&] { AdapterFolder{folder}; }).substr(folder.string().size());
  };
  CHECK(fault() == ": no such folder, expected an adapter (adapter_config.json and adapter_model.safetensors)");
  fs::create_directories(folder);
  CHECK_FALSE(AdapterFolder::is_adapter(folder));
  CHECK(fault() == ": holds no adapter_config.json; copy it from where the adapter comes from");
  test::write_text(folder / "adapter_config.json", "[]");
  CHECK(AdapterFolder::is_adapter(folder));
  CHECK(fault() == ": holds neither adapter_model.safetensors nor adapter_model.bin; copy one from where the adapter comes from");
  io::write_safetensors(folder / "adapter_model.safetensors", {});
  CHECK(fault() == "/adapter_config.json: got [], expected a JSON object");
}
