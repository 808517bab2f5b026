// Times one kind of step of a T5 and prints JSON. It reads commands from standard input, so that a script can let
// several programs take turns on the same machine: see bench/README.md.

#include <torch/torch.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <sstream>

#include "backbones/backbone.h"
#include "core/error.h"
#include "evaluation/objective.h"
#include "io/json_object.h"
#include "routing/method.h"
#include "tensor/block_allocator.h"
#include "training/gradients.h"
#include "training/optimizer.h"

namespace mergex::bench {
namespace {

using Clock = std::chrono::steady_clock;

/// VmHWM: the most memory that this process has held, in MiB.
double peak_memory_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) / 1024.0;
  }
  return 0.0;
}

io::JsonObject options_of(const io::Json& value) {
  auto document = std::make_shared<io::JsonDocument>();
  document->value = value;
  document->file = "command line";
  return io::JsonObject(document);
}

struct Bench {
  Bench(const std::filesystem::path& folder_path, const io::Json& experts_json, const std::string& ids_file)
      : random(1, at::kCPU) {
    const io::CheckpointFolder folder(folder_path);
    backbones::BuildOptions options;
    options.tensors = at::TensorOptions(at::kFloat);
    model = backbones::build(folder.config(), "config.json", options);
    auto generator = tensor::cpu_generator(1, "weights");
    backbones::load_weights(*model, folder, generator, {});
    if (!experts_json.is_null()) {
      experts = routing::upcycle(model->feed_forwards(), routing::ExpertOptions::read(options_of(experts_json)), generator);
    }
    for (const auto& rows : io::read_json(ids_file)) batches.push_back(batch_of(rows));
    for (const auto& item : model->named_parameters()) parameters.push_back({item.key(), item.value(), 1e-4, 0.0});
    optimizer = training::OptimizerOptions::read(options_of({{"name", "adamw"}, {"learning_rate", 1e-4}})).make(parameters);
  }

  /// Rows of ids of equal length; 0 is padding.
  static evaluation::Batch batch_of(const io::Json& rows) {
    evaluation::Batch batch;
    const auto count = static_cast<std::int64_t>(rows.size()), length = static_cast<std::int64_t>(rows[0].size());
    std::vector<std::int64_t> ids, gold;
    for (const auto& row : rows) {
      for (const auto& id : row) ids.push_back(id.get<std::int64_t>());
      gold.push_back(static_cast<std::int64_t>(gold.size() % 2));
    }
    batch.inputs.input_ids_BT = torch::tensor(ids).view({count, length});
    batch.inputs.attention_mask_BT = (batch.inputs.input_ids_BT != 0).to(at::kLong);
    batch.gold_B = torch::tensor(gold);
    batch.num_units = static_cast<double>(count);
    return batch;
  }

  const evaluation::Batch& next_batch() { return batches[next++ % batches.size()]; }

  /// Calls `part` and adds its seconds to `phases` under this name.
  template <class Part>
  void timed(const char* name, Part&& part) {
    const auto start = Clock::now();
    part();
    phases[name] = std::chrono::duration<double>(Clock::now() - start).count();
  }

  double train_step() {
    const auto& batch = next_batch();
    double value = 0.0;
    Tensor loss;
    training::zero_gradients(parameters);
    timed("experts_begin_s", [&] { experts.begin(/*training=*/true, &random); });
    timed("forward_s", [&] {
      nn::ForwardContext context{.training = true, .random = &random};
      loss = objective.loss_sum(batch, model->forward(batch.inputs, context)) / batch.num_units;
      value = loss.item<double>();
    });
    timed("backward_s", [&] { loss.backward(); });
    timed("experts_finish_s", [&] { experts.finish_backward(); });
    timed("clip_s", [&] { training::clip_gradients(parameters, 1.0); });
    timed("optimizer_s", [&] { optimizer->step(1.0); });
    return value;
  }

  double evaluation_step() {
    const torch::NoGradGuard no_grad;
    const auto& batch = next_batch();
    nn::ForwardContext context;
    return objective.loss_sum(batch, model->forward(batch.inputs, context)).item<double>() / batch.num_units;
  }

  std::shared_ptr<backbones::Backbone> model;
  routing::ExpertSet experts;
  tensor::RandomStreams random;
  std::vector<evaluation::Batch> batches;
  std::size_t next = 0;
  evaluation::Objective objective{tasks::Kind::kClassification, at::kCPU, 0};
  std::vector<training::TrainedParameter> parameters;
  std::unique_ptr<training::Optimizer> optimizer;
  io::Json phases = io::Json::object();  // of the last training step
};

int run(int argc, char** argv) {
  if (argc < 4) {
    fail("usage: mergex_bench CHECKPOINT_FOLDER BATCHES.json THREADS [EXPERTS]; then on standard input, a line each: "
         "train, begin, evaluate");
  }
  tensor::use_block_allocator();
  at::set_num_threads(std::stoi(argv[3]));
  Bench bench(argv[1], argc > 4 ? io::Json::parse(argv[4]) : io::Json(), argv[2]);
  for (std::string command; std::getline(std::cin, command);) {
    const auto start = Clock::now();
    double loss = 0.0;
    if (command == "train") {
      loss = bench.train_step();
    } else if (command == "begin") {  // what an evaluation prepares once
      bench.experts.begin(/*training=*/false, nullptr);
    } else if (command == "evaluate") {
      loss = bench.evaluation_step();
    } else {
      fail("unknown command \"{}\"; expected train, begin or evaluate", command);
    }
    const auto seconds = std::chrono::duration<double>(Clock::now() - start).count();
    io::Json line{{"command", command}, {"seconds", seconds}, {"loss", loss}, {"peak_mib", peak_memory_mib()}};
    if (command == "train") line["phases"] = bench.phases;
    std::cout << line.dump() << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace mergex::bench

int main(int argc, char** argv) try {
  return mergex::bench::run(argc, argv);
} catch (const mergex::UserError& e) {
  std::cerr << "mergex_bench: error: " << e.what() << "\n";
  return 2;
} catch (const std::exception& e) {
  std::cerr << "mergex_bench: internal error: " << e.what() << "\n";
  return 1;
}
