#include "training/toy.h"

#include <torch/torch.h>

#include <fstream>

namespace mergex::test {
namespace fs = std::filesystem;

io::JsonObject object_of(const std::string& text) {
  auto document = std::make_shared<io::JsonDocument>();
  document->value = io::parse_json(text, "r.json");
  document->file = "r.json";
  return io::JsonObject(document);
}

training::TrainingOptions options_of(const std::string& training, const std::string& evaluation) {
  return training::TrainingOptions::read(object_of(training), object_of(evaluation));
}

Toy::Toy(const fs::path& folder, const ToyOptions& options) : objective(options.kind, at::kCPU, 0, options.loss) {
  const auto kind = options.kind;
  const io::Json config{{"model_type", "t5"}, {"vocab_size", 40}, {"d_model", 8}, {"d_kv", 4}, {"d_ff", 12},
                        {"num_layers", options.num_layers}, {"num_heads", 2}, {"dropout_rate", options.dropout}};
  backbones::BuildOptions build;
  build.tensors = at::TensorOptions(options.dtype);
  build.num_labels = kind == tasks::Kind::kRegression ? 1 : 3;
  build.head = kind == tasks::Kind::kSpanCorruption ? backbones::Head::kLanguageModel : backbones::Head::kClassification;
  model = backbones::build(config, "toy", build);
  auto generator = tensor::cpu_generator(1, "weights");
  model->initialize(generator, std::nullopt);
  if (!options.experts.empty()) {
    experts = routing::upcycle(model->feed_forwards(), routing::ExpertOptions::read(object_of(options.experts)), generator);
  }
  for (int i = 0; i < 16; ++i) {
    tasks::Encoded e;
    for (int t = 0; t <= (i * 5) % 7; ++t) e.ids.push_back(2 + (i * 7 + t * 3) % 38);
    e.ids.push_back(1);
    e.label = kind == tasks::Kind::kRegression ? 0.5 * i : i % 3;
    examples.push_back(e);
    run.lengths.push_back(static_cast<std::int64_t>(e.ids.size()));
  }
  fs::create_directories(folder);
  run.folder = folder;
  run.num_examples = 16;
  run.seed = 3;
  for (const auto& item : model->named_parameters()) run.parameters.emplace_back(item.key(), item.value());
  run.experts = experts.empty() ? nullptr : &experts;
  run.random = &random;
  const auto rows = [this](std::span<const std::size_t> members) {
    std::vector<const tasks::Encoded*> result;
    for (const auto i : members) result.push_back(&examples[i]);
    return result;
  };
  const auto batch = [this, kind, rows](std::span<const std::size_t> members) {
    if (kind != tasks::Kind::kSpanCorruption) return objective.batch(rows(members));
    std::vector<std::vector<std::int32_t>> inputs, targets;
    for (const auto i : members) {
      inputs.push_back(examples[i].ids);
      targets.push_back({examples[i].ids.rbegin(), examples[i].ids.rend()});
    }
    return objective.batch(inputs, targets);
  };
  run.count_units = [this, kind, rows, batch](std::span<const std::size_t> members, std::int64_t) {
    return kind == tasks::Kind::kSpanCorruption ? batch(members).num_units : objective.training_weight(rows(members));
  };
  run.loss_sum = [this, batch](std::span<const std::size_t> members, std::int64_t, nn::ForwardContext& context) {
    const auto b = batch(members);
    return objective.training_loss_sum(b, model->forward(b.inputs, context));
  };
  run.evaluate = [this] {
    const auto turn = num_evaluated_++;
    const double value = evaluations.empty() ? static_cast<double>(turn) : evaluations.at(turn);
    return training::Evaluation{{{"value", value}}, value};
  };
  run.write_model = [this](const fs::path& to) {
    std::ofstream out(to / "weights");
    for (const auto& [name, p] : run.parameters) out << fmt::format("{:.17g}\n", p.sum().item<double>());
  };
  run.read_model = [this](const fs::path& from) { read_from = from; };
}

std::vector<Tensor> Toy::weights() const {
  std::vector<Tensor> result;
  for (const auto& [name, p] : run.parameters) result.push_back(p.detach().clone());
  return result;
}

const Tensor& Toy::parameter(const std::string& name) const {
  for (const auto& [key, p] : run.parameters) {
    if (key == name) return p;
  }
  throw std::logic_error("no parameter " + name);
}

}  // namespace mergex::test
