#include "finetune_run.h"

#include <torch/torch.h>
#include <torch/version.h>
#include <unistd.h>

#include <cmath>
#include <ctime>
#include <fstream>
#include <map>

#include "core/error.h"
#include "core/log.h"
#include "core/random.h"
#include "io/atomic_file.h"
#include "io/sha256.h"
#include "multiply_adds.h"
#include "statistics/registry.h"
#include "tasks/corrupt_spans.h"
#include "tasks/labels.h"
#include "tensor/autocast.h"
#include "tensor/convert.h"
#include "tensorboard.h"

namespace mergex::engine {
namespace fs = std::filesystem;
using io::Json;

namespace {

std::string now() {
  const auto seconds = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

Json memory_json(const MemoryFactors& factors) {
  const auto m = estimate_memory(factors);
  return {{"parameters", m.parameters}, {"gradients", m.gradients},     {"moments", m.moments}, {"merging", m.merging},
          {"activations", m.activations}, {"process", m.process}, {"peak", m.peak}};
}

std::string resident_memory() {
  std::ifstream statm("/proc/self/statm");
  double total = 0.0, resident = 0.0;
  if (!(statm >> total >> resident)) return "";
  return fmt::format("{:.1f} GiB", resident * static_cast<double>(sysconf(_SC_PAGESIZE)) / (1 << 30));
}

/// Names of the classes that a checkpoint's head was trained on, by index; empty where config.json has none.
std::vector<std::string> labels_of(const Json& config) {
  std::vector<std::string> labels;
  const auto found = config.find("id2label");
  if (found == config.end() || !found->is_object()) return labels;
  for (std::size_t i = 0; i < found->size(); ++i) {
    const auto label = found->find(std::to_string(i));
    if (label == found->end() || !label->is_string()) return {};
    labels.push_back(label->get<std::string>());
  }
  return labels;
}

/// A head that was trained on the task's classes in another order would answer in a permuted one.
/// @return for each class of the task the output of the checkpoint's head that stands for it; empty: they agree
std::vector<std::int64_t> head_order(const io::CheckpointFolder& folder, const std::vector<std::string>& labels) {
  constexpr const char* kNewHead = "--set /model/new_head=true starts a new one";
  const auto* weight = folder.find("classification_head.out_proj.weight");
  if (weight == nullptr) return {};
  std::vector<std::int64_t> order;
  if (const auto theirs = labels_of(folder.config()); !theirs.empty()) {
    try {
      const auto matched = tasks::match_labels(labels, theirs, folder.path().string());
      order.assign(matched.begin(), matched.end());
    } catch (const UserError& error) {
      fail("{} ({})", error.what(), kNewHead);
    }
  } else if (weight->shape.empty() || weight->shape[0] != static_cast<std::int64_t>(labels.size())) {
    fail("{}: its head has the shape {}, the task has {} classes; use a checkpoint of this task, or a new head ({})",
         folder.path().string(), io::shape_text(weight->shape), labels.size(), kNewHead);
  }
  if (std::ranges::is_sorted(order)) return {};
  log::info("the checkpoint's head has the classes in another order; moved to the task's: {}", fmt::join(labels, ", "));
  return order;
}

/// The loss options with what the data says, checked against the task.
evaluation::TrainingLoss training_loss(const FinetunePlan& plan, const Dataset& dataset) {
  auto loss = plan.loss;
  const auto& origin = plan.training.training_origin;
  const auto& labels = dataset.data.labels;
  const bool has_weights = loss.balanced || !loss.class_weights.empty();
  if (has_weights && (plan.task.kind != tasks::Kind::kClassification || plan.task.text_to_text)) {
    fail("{}/class_weights: task \"{}\" {}; remove them", origin, plan.task.name,
         plan.task.text_to_text ? "trains on the tokens of its answers" : "has no classes");
  }
  if (loss.label_smoothing > 0.0 && plan.task.kind == tasks::Kind::kRegression && !plan.task.text_to_text) {
    fail("{}/label_smoothing: task \"{}\" predicts a number; remove it", origin, plan.task.name);
  }
  if (loss.balanced) loss.class_weights = evaluation::balanced_weights(dataset.train, labels, origin + "/class_weights");
  if (has_weights && loss.class_weights.size() != labels.size()) {
    fail("{}/class_weights: got {} numbers, but the task has {} classes: {}", origin, loss.class_weights.size(),
         labels.size(), fmt::join(labels, ", "));
  }
  return loss;
}

}  // namespace

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail("{}: cannot be made ({}); choose another --out", folder.string(), error.message());
}

std::string Machine::describe() const {
  return fmt::format("{} | {} threads | LibTorch {}", device.str(), threads, TORCH_VERSION);
}

std::optional<std::int64_t> Machine::available_memory() const {
  return device.is_cuda() ? available_gpu_memory(device.index()) : engine::available_memory();
}

FinetuneRun::FinetuneRun(FinetunePlan plan, std::shared_ptr<const Dataset> dataset, const Machine& machine,
                         bool counts_only)
    : plan_(std::move(plan)),
      dataset_(std::move(dataset)),
      machine_(machine),
      objective_(plan_.task.kind, machine.device, dataset_->tokenizer->pad_id(), training_loss(plan_, *dataset_),
                 plan_.experts && plan_.experts->depends_on_padding ? plan_.task.max_length : 0) {
  if (plan_.experts && plan_.experts->needs_cpu && !machine.device.is_cpu()) {
    fail("{}: product \"tiled\" and curvature kernel \"fused\" are for --device cpu; set them to \"automatic\"",
         plan_.experts->origin);
  }
  if (plan_.experts && plan_.experts->needs_float32 && plan_.training.precision != at::kFloat) {
    fail("{}/product: got \"tiled\", which has no lower precision than float32; set it to \"automatic\", or remove {}/precision",
         plan_.experts->origin, plan_.training.training_origin);
  }
  const auto& data = dataset_->data;
  select_by_ = plan_.training.select_best_by.empty() ? plan_.task.primary_metric : plan_.training.select_best_by;
  if (select_by_ != "loss" && std::ranges::find(data.metrics, select_by_) == data.metrics.end()) {
    fail("{}/select_best_by: got \"{}\", expected loss or one of the task's: {}", plan_.training.evaluation_origin,
         select_by_, fmt::join(data.metrics, ", "));
  }
  higher_is_better_ = statistics::find_metric(select_by_).higher_is_better;
  const auto steps = plan_.training.num_steps(static_cast<std::int64_t>(dataset_->train.size()));
  if (const auto warmup = plan_.training.schedule.warmup(steps); steps > 0 && warmup >= steps) {
    fail("{}/schedule: warm-up takes {} steps, but training has {}; shorten it or train longer",
         plan_.training.training_origin, warmup, steps);
  }

  backbones::BuildOptions build;
  build.head = plan_.model.head;
  build.num_labels = plan_.task.kind == tasks::Kind::kClassification ? static_cast<std::int64_t>(data.labels.size()) : 1;
  build.label_names = data.labels;
  build.dropout = plan_.model.dropout;
  build.embedding_std = plan_.model.embedding_std;
  build.tensors = at::TensorOptions()
                      .dtype(tensor::dtype_from_name(plan_.model.dtype))
                      .device(counts_only ? at::Device(at::kMeta) : at::Device(at::kCPU));

  std::optional<io::CheckpointFolder> folder;
  std::vector<std::int64_t> head_outputs;
  if (plan_.model.checkpoint) {
    folder.emplace(*plan_.model.checkpoint);
    weight_files_ = folder->files();
    if (plan_.model.head == backbones::Head::kClassification && plan_.task.kind == tasks::Kind::kClassification &&
        !plan_.model.new_head) {
      head_outputs = head_order(*folder, data.labels);
    }
  }
  const auto& config = folder ? folder->config() : *plan_.model.config;
  const auto origin = folder ? (folder->path() / "config.json").string() : plan_.model.config_origin;
  model_.backbone = backbones::build(config, origin, build);
  model_.tokenizer_file = dataset_->tokenizer->model_file();
  const auto rows = model_.backbone->vocab_size();
  if (rows < dataset_->tokenizer->vocab_size()) {
    fail("{}{}/vocab_size: got {}, but the tokenizer {} has {} ids; use the tokenizer that belongs to the model", origin,
         origin.find('#') == std::string::npos ? "#" : "", rows, model_.tokenizer_file.string(),
         dataset_->tokenizer->vocab_size());
  }

  const auto seed = static_cast<std::uint64_t>(plan_.seed);
  auto weights = tensor::cpu_generator(seed, "weights");
  if (folder) {
    backbones::load_weights(*model_.backbone, *folder, weights, {.check_only = counts_only, .new_head = plan_.model.new_head});
    if (!head_outputs.empty() && !counts_only) model_.backbone->reorder_labels(head_outputs);
  } else if (!counts_only) {
    model_.backbone->initialize(weights, std::nullopt);
  }
  if (plan_.experts) {
    auto generator = tensor::cpu_generator(seed, "experts");
    model_.experts = routing::upcycle(model_.backbone->feed_forwards(), *plan_.experts, generator);
    model_.expert_options = plan_.resolved->at("experts");
    if (folder && read_experts(model_, folder->path(), counts_only)) log::info("experts from the checkpoint");
  } else if (folder && fs::exists(folder->path() / "experts.safetensors")) {
    log::warn("{}: holds experts, which this recipe does not use; the base experts are loaded as a dense model",
              folder->path().string());
  }
  std::vector<std::string> names;
  for (const auto& item : model_.backbone->named_parameters()) names.push_back(item.key());
  training::match_groups(plan_.training.parameter_groups, names);
  if (!counts_only) model_.backbone->to(machine_.device);
}

Json FinetuneRun::groups_json() const {
  std::vector<std::string> names;
  for (const auto& item : model_.backbone->named_parameters()) names.push_back(item.key());
  const auto& groups = plan_.training.parameter_groups;
  Json json = Json::array();
  for (const auto& group : groups) {
    json.push_back({{"pattern", group.pattern}, {"frozen", group.frozen}, {"tensors", 0}, {"parameters", 0}});
    if (group.learning_rate) json.back()["learning_rate"] = *group.learning_rate;
    if (group.weight_decay) json.back()["weight_decay"] = *group.weight_decay;
  }
  const auto group_of = training::match_groups(groups, names);
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (!group_of[i]) continue;
    auto& group = json[*group_of[i]];
    group["tensors"] = group["tensors"].get<std::int64_t>() + 1;
    group["parameters"] = group["parameters"].get<std::int64_t>() + model_.backbone->named_parameters()[names[i]].numel();
  }
  return json;
}

MemoryFactors FinetuneRun::memory_factors() const {
  MemoryFactors f;
  f.shape = backbones::T5Config::read(model_.backbone->config(), plan_.model.config_origin);
  if (plan_.model.dropout) f.shape.dropout_rate = *plan_.model.dropout;
  f.language_model = plan_.model.head == backbones::Head::kLanguageModel;
  for (const auto& item : model_.backbone->named_parameters()) {
    const auto& p = item.value();
    f.num_parameters += p.numel();
    f.bytes_per_value = static_cast<std::int64_t>(p.element_size());
    // Row and column sums of every matrix, and vectors whole.
    f.num_factored += p.dim() < 2 ? p.numel() : p.numel() / p.size(-1) + p.numel() / p.size(-2);
  }
  for (const auto& place : model_.experts.places()) {
    const auto weight = place.layer->dense_weight();
    const auto& options = plan_.resolved->at("experts");
    f.experts.push_back({.num_experts = options.at("num_experts"),
                         .out_features = weight.size(0),
                         .in_features = weight.size(1),
                         .merges = plan_.experts->method != "smoe",
                         .top_k = options.at("router").value("top_k", options.at("num_experts").get<std::int64_t>()),
                         .curvature_rank = options.contains("curvature") && options["curvature"].is_object()
                                               ? options["curvature"].at("rank").get<std::int64_t>()
                                               : 0});
  }

  const auto shape = [&](std::int64_t batch_size, std::span<const std::vector<tasks::Encoded>> parts) {
    std::size_t longest = 0, longest_target = 0, count = 0;
    for (const auto& part : parts) {
      count = std::max(count, part.size());
      for (const auto& example : part) {
        longest = std::max(longest, example.ids.size());
        longest_target = std::max(longest_target, example.target_ids.size());
        f.num_data_tokens += static_cast<std::int64_t>(example.ids.size());
      }
      f.num_examples += static_cast<std::int64_t>(part.size());
    }
    const bool pads_all = plan_.experts && plan_.experts->depends_on_padding;
    const auto length = pads_all ? plan_.task.max_length : static_cast<std::int64_t>(longest);
    BatchShape batch{.size = std::min(batch_size, static_cast<std::int64_t>(count)), .length = length, .decoder_length = length};
    if (plan_.task.span_corruption) {
      batch.length = plan_.task.max_length;
      batch.decoder_length = tasks::span_lengths(plan_.task.max_length, *plan_.task.span_corruption).targets;
    } else if (plan_.task.text_to_text) {
      batch.decoder_length = static_cast<std::int64_t>(longest_target);
    }
    return batch;
  };
  f.training = shape(plan_.training.batch_size, {&dataset_->train, 1});
  f.evaluation = shape(plan_.training.evaluation_batch_size, dataset_->validation);
  f.gradient_accumulation = plan_.training.gradient_accumulation;
  const auto& training = plan_.resolved->at("training");
  f.adafactor = training.at("optimizer").at("name") == "adafactor";
  f.activation_checkpointing = training.value("activation_checkpointing", false);
  f.half_precision = training.value("precision", "float32") != "float32";
  f.averages_weights = training.contains("ema");
  f.on_gpu = machine_.device.is_cuda();
  return f;
}

Json FinetuneRun::plan_json() const {
  const auto counts = count_parameters(model_);
  const auto groups = groups_json();
  auto trained = counts.total();
  for (const auto& group : groups) {
    if (group["frozen"].get<bool>()) trained -= group["parameters"].get<std::int64_t>();
  }
  const auto& t = plan_.training;
  const auto examples = static_cast<std::int64_t>(dataset_->train.size());
  const auto factors = memory_factors();
  const auto cost = count_multiply_adds(factors);
  Json splits = Json::object();
  for (std::size_t i = 0; i < dataset_->validation.size(); ++i) {
    splits[dataset_->data.validation[i].name] = dataset_->validation[i].size();
  }
  return {{"name", plan_.name},
          {"method", plan_.experts ? plan_.experts->method : "dense"},
          {"parameters",
           {{"dense", counts.dense},
            {"head", counts.head},
            {"experts", counts.experts.experts},
            {"routers", counts.experts.routers},
            {"curvature", counts.experts.curvature},
            {"total", counts.total()},
            {"trained", trained}}},
          {"parameter_groups", groups},
          {"task", plan_.task.name},
          {"train_examples", examples},
          {"evaluated", splits},
          {"steps", t.num_steps(examples)},
          {"steps_per_epoch", t.steps_per_epoch(examples)},
          {"warmup_steps", t.schedule.warmup(t.num_steps(examples))},
          {"examples_per_step", t.batch_size * t.gradient_accumulation},
          {"multiply_adds", {{"sentence", cost.sentence}, {"merging", cost.merging}, {"curvature", cost.curvature}}},
          {"memory", memory_json(factors)}};
}

namespace {

/// `frozen`, or what differs from the optimizer's options.
std::string group_text(const Json& group) {
  if (group["frozen"].get<bool>()) return "frozen";
  std::string text;
  for (const char* key : {"learning_rate", "weight_decay"}) {
    if (group.contains(key)) text += fmt::format("{}{} {:g}", text.empty() ? "" : ", ", key, group[key].get<double>());
  }
  return text.empty() ? "as the rest" : text;
}

}  // namespace

std::string FinetuneRun::describe() const {
  const auto plan = plan_json();
  std::string text = fmt::format("  method      {}\n  parameters ", plan["method"].get<std::string>());
  for (const auto& [part, count] : plan["parameters"].items()) text += fmt::format(" {} {} |", part, count.get<std::int64_t>());
  text.resize(text.size() - 2);
  text += fmt::format("\n  data        {}: {} training examples", plan_.task.name, dataset_->train.size());
  for (const auto& [split, count] : plan["evaluated"].items()) text += fmt::format(", {} {}", count.get<std::int64_t>(), split);
  text += fmt::format("\n  training    {} steps of {} examples ({} an epoch), {} of warm-up, {} {}\n",
                      plan["steps"].get<std::int64_t>(), plan["examples_per_step"].get<std::int64_t>(),
                      plan["steps_per_epoch"].get<std::int64_t>(), plan["warmup_steps"].get<std::int64_t>(),
                      plan_.training.optimizer.name,
                      plan_.training.optimizer.learning_rate
                          ? fmt::format("with peak learning rate {:g}", *plan_.training.optimizer.learning_rate)
                          : "with its own learning rate");
  for (const auto& group : plan["parameter_groups"]) {
    text += fmt::format("  group       {}: {} parameters in {} tensors, {}\n", group["pattern"].get<std::string>(),
                        group["parameters"].get<std::int64_t>(), group["tensors"].get<std::int64_t>(),
                        group_text(group));
  }
  const auto& cost = plan["multiply_adds"];
  text += fmt::format("  cost        {:.2f} G multiply-adds a sentence of {} tokens", 1e-9 * cost.at("sentence").get<double>(),
                      memory_factors().training.length);
  if (const auto merging = cost.at("merging").get<double>(); merging > 0.0) {
    text += fmt::format(", {:.2f} G of them for merging", 1e-9 * merging);
  }
  if (const auto curvature = cost.at("curvature").get<double>(); curvature > 0.0) {
    text += fmt::format("; curvature {:.2f} G a step", 1e-9 * curvature);
  }
  text += "\n";
  const auto& memory = plan["memory"];
  text += "  memory     ";
  for (const auto& [part, bytes] : memory.items()) {
    if (part != "peak") text += fmt::format(" {} {} |", part, size_text(bytes));
  }
  text.resize(text.size() - 2);
  text += fmt::format("; peak about {}", size_text(memory.at("peak")));
  if (const auto available = machine_.available_memory()) text += fmt::format(", available {}", size_text(*available));
  return text + "\n";
}

evaluation::Batch FinetuneRun::text_batch(std::span<const std::size_t> examples,
                                          const std::vector<tasks::Encoded>& from, const std::string& stream) const {
  const auto& tokenizer = *dataset_->tokenizer;
  const auto sentinel = [&](int i) { return tokenizer.sentinel_id(i); };
  std::vector<std::vector<std::int32_t>> inputs, targets;
  for (const auto example : examples) {
    const auto& ids = from[example].ids;
    // The mask of an example depends on epoch and example alone, not on the batch that it is in.
    const auto mask = tasks::random_spans_noise_mask(
        static_cast<std::int64_t>(ids.size()), *plan_.task.span_corruption,
        stream_seed(static_cast<std::uint64_t>(plan_.seed), fmt::format("{}/{}", stream, example)));
    inputs.push_back(tasks::replace_spans(ids, mask, true, sentinel));
    targets.push_back(tasks::replace_spans(ids, mask, false, sentinel));
    inputs.back().push_back(tokenizer.eos_id());
    targets.back().push_back(tokenizer.eos_id());
  }
  return objective_.batch(inputs, targets);
}

std::vector<evaluation::SplitResult> FinetuneRun::evaluate() {
  const tensor::Autocast precision(machine_.device.type(), plan_.training.precision);
  model_.experts.begin(/*training=*/false, nullptr);
  std::vector<evaluation::SplitResult> results;
  const auto& data = dataset_->data;
  for (std::size_t i = 0; i < data.validation.size(); ++i) {
    const auto& examples = dataset_->validation[i];
    const auto& name = data.validation[i].name;
    const auto order = evaluation::batch_order(examples, plan_.training.length_bucketing);
    if (plan_.task.span_corruption) {
      results.push_back(evaluation::evaluate_loss(
          *model_.backbone, objective_, name, order, plan_.training.evaluation_batch_size,
          [&](std::span<const std::size_t> members) {
            return text_batch(members, examples, "span_corruption/" + name);
          }));
    } else if (plan_.task.text_to_text) {
      results.push_back(evaluation::evaluate_generated(*model_.backbone, objective_, plan_.task.kind, name, examples,
                                                       data.metrics, data.labels, plan_.training.evaluation_batch_size,
                                                       *dataset_->tokenizer));
    } else {
      results.push_back(evaluation::evaluate_split(*model_.backbone, objective_, plan_.task.kind, name, examples, order,
                                                   data.metrics, data.labels, plan_.training.evaluation_batch_size));
    }
  }
  return results;
}

double FinetuneRun::selected_value(const evaluation::SplitResult& split) const {
  const auto value = split.value(select_by_);
  // An undefined correlation (a constant predictor) loses against every defined one.
  return std::isfinite(value) ? value : higher_is_better_ ? -1.0 : 1e300;
}

void FinetuneRun::write_predictions(const fs::path& folder, const std::vector<evaluation::SplitResult>& splits) const {
  const auto& data = dataset_->data;
  const auto shown = [&](double value) -> Json {
    if (plan_.task.kind == tasks::Kind::kRegression) return value;
    return data.labels[static_cast<std::size_t>(value)];
  };
  io::write_file_with(folder / "predictions.jsonl", [&](int fd) {
    std::string text;
    for (std::size_t s = 0; s < splits.size(); ++s) {
      for (std::size_t i = 0; i < splits[s].predictions.size(); ++i) {
        const auto& p = splits[s].predictions[i];
        Json line{{"split", splits[s].name}, {"id", dataset_->validation[s][i].id}};
        line["gold"] = p.gold ? shown(*p.gold) : Json(nullptr);
        line["prediction"] = p.is_parsable ? shown(p.predicted) : Json(nullptr);
        if (plan_.task.text_to_text) {
          line["text"] = p.text;
        } else {
          line["scores"] = p.logits;
        }
        text += line.dump() + "\n";
      }
    }
    io::write_all(fd, text.data(), text.size());
  });
}

Json FinetuneRun::results(const training::TrainingResult& trained,
                          const std::vector<evaluation::SplitResult>& splits) const {
  const auto counts = count_parameters(model_);
  Json json{{"name", plan_.name},
            {"task", plan_.task.name},
            {"method", plan_.experts ? plan_.experts->method : "dense"},
            {"seed", plan_.seed},
            {"steps", trained.steps},
            {"selected_by", select_by_},
            {"higher_is_better", higher_is_better_},
            {"selection", "best of the evaluations during training, on the first split"},
            {"unit", plan_.task.span_corruption ? "target tokens" : "examples"},
            {"best_step", trained.best_step},
            {"stopped_early", trained.stopped_early},
            {"skipped_lines", dataset_->data.skipped_lines}};
  Json list = Json::array();
  for (const auto& split : splits) {
    auto entry = split.to_json();
    if (plan_.task.kind == tasks::Kind::kClassification && split.num_scored > 0) {
      std::map<double, std::int64_t> by_class;
      for (const auto& p : split.predictions) {
        if (p.gold) ++by_class[*p.gold];
      }
      const auto most = std::ranges::max_element(by_class, {}, [](const auto& c) { return c.second; });
      entry["majority_class"] = dataset_->data.labels[static_cast<std::size_t>(most->first)];
      entry["majority_share"] = static_cast<double>(most->second) / static_cast<double>(split.num_scored);
    }
    list.push_back(entry);
  }
  json["splits"] = list;
  if (!model_.experts.empty()) {
    const auto report = model_.experts.report();
    json["experts"] = {{"task_vector_ratio", report.task_vector_ratio},
                       {"kept_fraction", report.kept_fraction},
                       {"router_entropy", report.router_entropy},
                       {"experts_per_unit", report.experts_per_unit}};
  }
  json["parameters"] = {{"dense", counts.dense},
                        {"head", counts.head},
                        {"experts", counts.experts.experts},
                        {"routers", counts.experts.routers},
                        {"curvature", counts.experts.curvature}};
  if (plan_.paper) json["paper"] = *plan_.paper;
  return json;
}

std::vector<fs::path> FinetuneRun::input_files() const {
  auto files = dataset_->data.files;
  files.insert(files.end(), weight_files_.begin(), weight_files_.end());
  files.push_back(model_.tokenizer_file);
  return files;
}

void FinetuneRun::check_machine(const fs::path& folder) const {
  if (!fs::exists(folder / "manifest.json")) return;
  const auto before = io::read_json(folder / "manifest.json");
  const auto device = before.value("device", machine_.device.str());
  if (at::Device(device).type() != machine_.device.type()) {
    fail("{}: was started on {}, whose random streams do not continue on {}; give --device {}", folder.string(), device,
         machine_.device.str(), device);
  }
  if (const auto threads = before.value("threads", machine_.threads); threads != machine_.threads) {
    log::warn("{}: was started with {} threads, goes on with {}; its files will differ in rounding", folder.string(),
              threads, machine_.threads);
  }
}

Json FinetuneRun::run(const fs::path& folder) {
  check_machine(folder);
  make_folder(folder);
  io::write_json(folder / "recipe.resolved.json", *plan_.resolved);
  Json inputs = Json::object();
  for (const auto& file : input_files()) inputs[file.string()] = io::sha256_file(file);
  Json manifest{{"mergex", MERGEX_VERSION},         {"build", MERGEX_BUILD},      {"libtorch", TORCH_VERSION},
                {"device", machine_.device.str()}, {"threads", machine_.threads}, {"seed", plan_.seed},
                {"started", now()},                {"inputs", inputs}};
  io::write_json(folder / "manifest.json", manifest);

  tensor::RandomStreams random(static_cast<std::uint64_t>(plan_.seed), machine_.device);
  training::Run run;
  run.folder = folder;
  run.num_examples = static_cast<std::int64_t>(dataset_->train.size());
  for (const auto& example : dataset_->train) run.lengths.push_back(static_cast<std::int64_t>(example.ids.size()));
  run.seed = static_cast<std::uint64_t>(plan_.seed);
  run.higher_is_better = higher_is_better_;
  for (const auto& item : model_.backbone->named_parameters()) {
    run.parameters.emplace_back(item.key(), item.value());
  }
  run.experts = model_.experts.empty() ? nullptr : &model_.experts;
  run.random = &random;
  const auto members = [this](std::span<const std::size_t> examples) {
    std::vector<const tasks::Encoded*> result;
    for (const auto i : examples) result.push_back(&dataset_->train[i]);
    return result;
  };
  const auto batch_of = [this, members](std::span<const std::size_t> examples, std::int64_t epoch) {
    if (plan_.task.span_corruption) {
      return text_batch(examples, dataset_->train, fmt::format("span_corruption/train/{}", epoch));
    }
    return plan_.task.text_to_text ? objective_.text_batch(members(examples)) : objective_.batch(members(examples));
  };
  run.count_units = [this, batch_of, members](std::span<const std::size_t> examples, std::int64_t epoch) {
    if (plan_.task.span_corruption) return batch_of(examples, epoch).num_units;  // made anew in every epoch
    if (!plan_.task.text_to_text) return objective_.training_weight(members(examples));
    double tokens = 0.0;
    for (const auto* example : members(examples)) tokens += static_cast<double>(example->target_ids.size());
    return tokens;
  };
  run.loss_sum = [this, batch_of](std::span<const std::size_t> examples, std::int64_t epoch,
                                  nn::ForwardContext& context) {
    const auto batch = batch_of(examples, epoch);
    return objective_.training_loss_sum(batch, model_.backbone->forward(batch.inputs, context));
  };
  run.evaluate = [this] {
    const auto splits = evaluate();
    training::Evaluation result{.metrics = Json::object()};
    for (const auto& split : splits) {
      auto json = split.to_json();
      json.erase("split");
      result.metrics[split.name] = json;
    }
    result.selected = selected_value(splits[0]);
    return result;
  };
  run.write_model = [this](const fs::path& to) { write_model(model_, to); };
  run.read_model = [this](const fs::path& from) { read_model(model_, from); };
  if (plan_.training.tensorboard) run.observe = tensorboard_observer(folder);
  run.memory = resident_memory;

  log::info("{} | mergex {} | {} | seed {}", plan_.name, MERGEX_VERSION, machine_.describe(), plan_.seed);
  const auto trained = training::train(plan_.training, run);

  // The reported numbers are the reloaded best checkpoint's own, not the ones remembered from training.
  const auto splits = evaluate();
  const auto reloaded = selected_value(splits[0]);
  if (reloaded != trained.best) {
    const auto message = fmt::format("the reloaded best checkpoint gives {} {}, but {} was seen at step {}", select_by_,
                                     reloaded, trained.best, trained.best_step);
    // Sums depend on the number of threads, and a run may have been resumed with another.
    if (std::abs(reloaded - trained.best) > 1e-4 * std::max(1.0, std::abs(trained.best))) throw std::runtime_error(message);
    log::warn("{} (rounding)", message);
  }
  if (!plan_.task.span_corruption) write_predictions(folder, splits);
  const auto result = results(trained, splits);
  manifest["finished"] = now();
  io::write_json(folder / "manifest.json", manifest);
  io::write_json(folder / "results.json", result);
  return result;
}

}  // namespace mergex::engine
