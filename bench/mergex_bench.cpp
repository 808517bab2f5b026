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
#include "training/adamw.h"

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
      auto document = std::make_shared<io::JsonDocument>();
      document->value = experts_json;
      document->file = "experts";
      experts = routing::upcycle(model->feed_forwards(), routing::ExpertOptions::read(io::JsonObject(document)), generator);
    }
    const auto ids = io::read_json(ids_file);
    const auto rows = static_cast<std::int64_t>(ids.size()), columns = static_cast<std::int64_t>(ids[0].size());
    batch.inputs.input_ids_BT = torch::zeros({rows, columns}, at::kLong);
    batch.gold_B = torch::zeros({rows}, at::kLong);
    for (std::int64_t b = 0; b < rows; ++b) {
      for (std::int64_t t = 0; t < columns; ++t) {
        batch.inputs.input_ids_BT[b][t] = ids[static_cast<std::size_t>(b)][static_cast<std::size_t>(t)].get<std::int64_t>();
      }
      batch.gold_B[b] = b % 2;
    }
    batch.inputs.attention_mask_BT = (batch.inputs.input_ids_BT != 0).to(at::kLong);
    batch.num_units = static_cast<double>(rows);
    for (const auto& item : model->named_parameters()) parameters.emplace_back(item.key(), item.value());
    optimizer = std::make_unique<training::AdamW>(parameters, training::AdamWOptions());
  }

  /// Calls `part` and adds its seconds to `phases` under this name.
  template <class Part>
  void timed(const char* name, Part&& part) {
    const auto start = Clock::now();
    part();
    phases[name] = std::chrono::duration<double>(Clock::now() - start).count();
  }

  double train_step() {
    double value = 0.0;
    Tensor loss;
    optimizer->zero_grad();
    timed("experts_begin_s", [&] { experts.begin(/*training=*/true, &random); });
    timed("forward_s", [&] {
      nn::ForwardContext context{.training = true, .random = &random};
      loss = objective.loss_sum(batch, model->forward(batch.inputs, context)) / batch.num_units;
      value = loss.item<double>();
    });
    timed("backward_s", [&] { loss.backward(); });
    timed("experts_finish_s", [&] { experts.finish_backward(); });
    timed("clip_s", [&] { training::clip_gradients(parameters, 1.0); });
    timed("optimizer_s", [&] { optimizer->step(1e-4); });
    return value;
  }

  double evaluation_step() {
    const torch::NoGradGuard no_grad;
    nn::ForwardContext context;
    return objective.loss_sum(batch, model->forward(batch.inputs, context)).item<double>() / batch.num_units;
  }

  std::shared_ptr<backbones::Backbone> model;
  routing::ExpertSet experts;
  tensor::RandomStreams random;
  evaluation::Batch batch;
  evaluation::Objective objective{tasks::Kind::kClassification, at::kCPU, 0};
  std::vector<std::pair<std::string, Tensor>> parameters;
  std::unique_ptr<training::AdamW> optimizer;
  io::Json phases = io::Json::object();  // of the last training step
};

int run(int argc, char** argv) {
  if (argc < 4) {
    fail("usage: mergex_bench CHECKPOINT_FOLDER IDS.json THREADS [EXPERTS]; then on standard input, a line each: train, "
         "begin, evaluate");
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
