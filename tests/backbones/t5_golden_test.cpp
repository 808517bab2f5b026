#include <torch/torch.h>

#include "backbones/t5.h"
#include "core/error.h"
#include "nn/relative_position.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/tensors.h"
#include "tensor/random_streams.h"
#include "training/gradients.h"
#include "training/parameter_groups.h"
#include "training/schedule.h"

// Cases of golden/models: outputs, gradients and training of small models as Hugging Face's transformers gives them.

using namespace mergex;
using backbones::Head;
namespace fs = std::filesystem;

namespace {

// By the prefix of a folder's name: what is promised, and what nobody has promised yet.
constexpr std::string_view kPromised[] = {"t5_", "odd_keys_t5", "train_t5_"};
constexpr std::string_view kLater[] = {"gpt2", "roberta", "phi3", "llama", "lora_", "train_", "odd_"};

bool has_prefix(const std::string& name, std::span<const std::string_view> prefixes) {
  return std::ranges::any_of(prefixes, [&](std::string_view prefix) { return name.starts_with(prefix); });
}

struct Case {
  std::string name;
  io::Json expected;
  test::Tensors tensors;
  std::shared_ptr<backbones::Backbone> model;

  Case(const fs::path& folder, const std::string& config_file)
      : name(folder.filename().string()),
        expected(io::read_json(folder / "expected.json")),
        tensors(test::read_tensors(folder / "expected.safetensors")) {
    const bool classifies = expected.at("model_class") == "T5ForSequenceClassification";
    backbones::BuildOptions options;
    options.head = classifies ? Head::kClassification : Head::kLanguageModel;
    if (classifies) options.num_labels = expected.at("scalars").at("num_labels");
    const auto config = io::read_json(folder / config_file);
    model = backbones::build(config, (folder / config_file).string(), options);
    auto generator = tensor::cpu_generator(0, "unused");
    backbones::load_weights(*model, io::CheckpointFolder(folder), generator, {});
  }

  Tensor at(const std::string& key) const { return tensors.at(key); }
  bool has(const std::string& key) const { return tensors.contains(key); }
};

Tensor loss_of(const Case& c, const Tensor& logits, const Tensor& labels) {
  if (c.expected.at("model_class") != "T5ForSequenceClassification") {
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), labels.flatten());
  }
  if (logits.size(1) == 1) return torch::mse_loss(logits.squeeze(1), labels.to(logits.scalar_type()));
  return torch::nn::functional::cross_entropy(logits, labels);
}

double check_outputs(Case& c) {
  double largest = 0.0;
  const auto real_BT1 = c.at("attention_mask").unsqueeze(-1);
  nn::ForwardContext context;
  context.probe = [&](std::string_view name, const Tensor& got) {
    const std::string key(name);
    if (!c.has(key) || key.ends_with("position_bias")) return;
    const bool encoder = key.starts_with("encoder");
    const auto a = encoder ? got * real_BT1 : got, b = encoder ? c.at(key) * real_BT1 : c.at(key);
    test::require_close(c.name + " " + key, a, b, test::kLogits);
    largest = std::max(largest, test::compare(a, b, test::kLogits).difference);
  };
  const auto labels = c.at("labels");
  const auto logits = c.model->forward({c.at("input_ids"), c.at("attention_mask"), labels}, context);
  test::require_close(c.name + " logits", logits, c.at("logits"), test::kLogits);
  largest = std::max(largest, test::compare(logits, c.at("logits"), test::kLogits).difference);
  const auto loss = loss_of(c, logits, labels);
  CHECK(loss.item<double>() == Approx(c.expected.at("scalars").at("loss").get<double>()).epsilon(1e-5));

  loss.backward();
  int compared = 0;
  for (const auto& item : c.model->named_parameters()) {
    const auto key = "grad." + c.model->file_name(item.key());
    if (!c.has(key)) continue;
    test::require_gradient(c.name + " " + key, item.value().grad(), c.at(key), 1e-4, 1e-7);
    ++compared;
  }
  int expected_gradients = 0;
  for (const auto& [key, value] : c.tensors) expected_gradients += key.starts_with("grad.") ? 1 : 0;
  CHECK(compared == expected_gradients);
  return largest;
}

void check_positions(Case& c) {
  if (!c.has("buckets.bidirectional")) return;
  const auto config = backbones::T5Config::read(c.model->config(), c.name);
  const auto distance = torch::arange(-300, 301);
  for (const bool bidirectional : {true, false}) {
    const auto buckets = nn::relative_position_bucket(distance, bidirectional, config.relative_attention_num_buckets,
                                                      config.relative_attention_max_distance);
    CHECK(torch::equal(buckets, c.at(bidirectional ? "buckets.bidirectional" : "buckets.causal")));
  }
  const auto length = c.expected.at("scalars").at("position_bias_length").get<std::int64_t>();
  nn::ForwardContext context;
  context.probe = [&](std::string_view name, const Tensor& got) {
    if (name.ends_with("position_bias")) {
      test::require_close(c.name + " " + std::string(name), got, c.at(std::string(name)), {0.0, 0.0});
    }
  };
  const auto ids = torch::ones({1, length}, at::kLong);
  c.model->forward({ids, torch::ones_like(ids), ids}, context);
}

void check_generation(Case& c) {
  if (!c.has("generate.input_ids")) return;
  const torch::NoGradGuard no_grad;
  const auto& options = c.expected.at("scalars").at("generate");
  const auto generate = [&](std::optional<std::int64_t> eos) {
    nn::ForwardContext context;
    return c.model->generate(c.at("generate.input_ids"), c.at("generate.attention_mask"),
                             options.at("max_new_tokens"), eos, context);
  };
  CHECK(torch::equal(generate(std::nullopt), c.at("generate.output_ids")));
  const auto with_eos = generate(options.at("eos_token_id_for_with_eos").get<std::int64_t>());
  const auto expected = c.at("generate.output_ids_with_eos");
  CHECK(torch::equal(with_eos, expected.slice(1, 0, with_eos.size(1))));
  CHECK(expected.slice(1, with_eos.size(1)).count_nonzero().item<std::int64_t>() == 0);  // only padding is left

  // The cache gives what a forward pass over the whole prefix gives.
  nn::ForwardContext context;
  const auto ids = c.at("generate.output_ids");
  const auto logits = c.model->forward({c.at("generate.input_ids"), c.at("generate.attention_mask"), ids.slice(1, 1)}, context);
  CHECK(torch::equal(logits.argmax(-1), ids.slice(1, 1)));
}

double check_training(Case& c) {
  const auto& s = c.expected.at("scalars");
  std::vector<std::pair<std::string, Tensor>> parameters;
  for (const auto& item : c.model->named_parameters()) parameters.emplace_back(item.key(), item.value());
  auto section = std::make_shared<io::JsonDocument>();
  section->file = c.name;
  section->value = {{"name", s.at("optimizer")}, {"learning_rate", s.at("base_lr")}, {"weight_decay", s.at("weight_decay")}};
  const bool is_adafactor = s.at("optimizer") == "adafactor";
  if (is_adafactor) section->value["scale_parameter"] = false;
  const auto options = training::OptimizerOptions::read(io::JsonObject(section));
  const auto trained = training::trained_parameters(parameters, options, {});
  const auto optimizer = options.make(trained);
  training::Schedule schedule;
  if (is_adafactor) schedule.kind = training::Schedule::Kind::kConstant;
  if (!s.at("warmup_steps").is_null()) schedule.warmup_steps = s.at("warmup_steps");
  const double max_grad_norm = s.at("max_grad_norm").is_null() ? 0.0 : s.at("max_grad_norm").get<double>();
  const auto steps = s.at("steps").get<std::int64_t>();

  std::vector<std::string> undecayed;
  for (const auto& p : trained) {
    if (p.weight_decay != options.weight_decay) undecayed.push_back(p.name);
  }
  auto expected_undecayed = c.expected.at("no_decay").get<std::vector<std::string>>();
  std::ranges::sort(undecayed);
  std::ranges::sort(expected_undecayed);
  CHECK(undecayed == expected_undecayed);

  for (std::int64_t step = 0; step < steps; ++step) {
    const auto batch = fmt::format("batch{}.", step % 3);
    training::zero_gradients(trained);
    nn::ForwardContext context{.training = true};
    const auto labels = c.at(batch + "labels");
    const auto logits = c.model->forward({c.at(batch + "input_ids"), c.at(batch + "attention_mask"), labels}, context);
    const auto loss = loss_of(c, logits, labels);
    loss.backward();
    const auto norm = training::clip_gradients(trained, max_grad_norm);
    const auto lr = optimizer->step(schedule.factor(step, steps));
    CHECK(loss.item<double>() == Approx(c.at("loss")[step].item<double>()).margin(1e-4));
    CHECK(norm == Approx(c.at("grad_norm")[step].item<double>()).epsilon(1e-4));
    CHECK(lr == Approx(c.at("lr")[step].item<double>()).epsilon(1e-12));
  }
  double largest = 0.0;
  for (const auto& [name, p] : parameters) {
    const auto bound = 1e-5 + c.expected.at("final_fp32_vs_fp64_max_abs").at(name).get<double>();
    test::require_close("final." + name, p, c.at("final." + name), {0.0, bound});
    largest = std::max(largest, test::compare(p, c.at("final." + name), {0.0, bound}).difference);
  }
  return largest;
}

}  // namespace

TEST_CASE("T5 equals Hugging Face on every golden case", "[backbones][golden]") {
  const auto root = test::golden_folder("models");
  if (!root) return;
  std::vector<fs::path> folders;
  for (const auto& entry : fs::directory_iterator(*root)) {
    if (entry.is_directory()) folders.push_back(entry.path());
  }
  std::ranges::sort(folders);
  for (const auto& folder : folders) {
    const auto name = folder.filename().string();
    if (!has_prefix(name, kPromised)) {
      const bool known = has_prefix(name, kLater);
      test::log_golden("models/" + name, known ? "later" : "unknown");
      CHECK(known);
      continue;
    }
    INFO(name);
    double largest = 0.0;
    for (const char* config : {"config.json", "config_v4.json"}) {
      INFO(config);
      Case c(folder, config);
      if (name.starts_with("train_")) {
        largest = std::max(largest, check_training(c));
      } else {
        check_positions(c);
        check_generation(c);
        c.model->zero_grad();
        largest = std::max(largest, check_outputs(c));
      }
    }
    test::log_golden("models/" + name, fmt::format("ok, largest error {:.1e}", largest));
  }
}
