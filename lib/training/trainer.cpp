#include "training/trainer.h"

#include <fcntl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <fstream>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/log.h"
#include "tensor/autocast.h"
#include "training/data_order.h"
#include "training/gradients.h"
#include "training/precision.h"
#include "training/weight_average.h"

namespace mergex::training {
namespace fs = std::filesystem;
namespace {

const std::string kOptimizer = "optimizer.", kRandom = "random.";  // prefixes in the training state

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// metrics.jsonl: appended while training, cut back to a checkpoint's length on resume.
class MetricsFile {
 public:
  explicit MetricsFile(fs::path path) : path_(std::move(path)) {}

  void cut(std::int64_t bytes) {
    if (!fs::exists(path_)) std::ofstream(path_, std::ios::binary);
    fs::resize_file(path_, static_cast<std::uintmax_t>(bytes));
    bytes_ = bytes;
  }

  void append(const io::Json& line) {
    const auto text = line.dump() + "\n";
    std::ofstream out(path_, std::ios::binary | std::ios::app);
    out << text << std::flush;
    if (!out) throw std::system_error(errno, std::generic_category(), path_.string() + ": cannot be written");
    bytes_ += static_cast<std::int64_t>(text.size());
  }

  /// What a checkpoint speaks of must be on the disk before it.
  void sync() const {
    if (const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC); fd >= 0) {
      ::fsync(fd);
      ::close(fd);
    }
  }

  std::int64_t bytes() const { return bytes_; }

 private:
  fs::path path_;
  std::int64_t bytes_ = 0;
};

std::string duration_text(double s) {
  const auto whole = static_cast<std::int64_t>(s + 0.5);
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{}:{:02} min", whole / 60, whole % 60);
  return fmt::format("{}:{:02} h", whole / 3600, whole / 60 % 60);
}

/// `validation: loss 0.3037 accuracy 0.8620`
std::string evaluation_text(const io::Json& metrics) {
  std::string text;
  for (const auto& [split, values] : metrics.items()) {
    text += fmt::format("{}{}:", text.empty() ? "" : ", ", split);
    if (!values.is_object()) {
      text += " " + values.dump();
      continue;
    }
    for (const auto& [name, value] : values.items()) {
      if (value.is_number_float()) text += fmt::format(" {} {:.4f}", name, value.get<double>());
      if (value.is_null()) text += fmt::format(" {} undefined", name);
      if (name == "collapsed") text += fmt::format(" ({})", value.get<std::string>());
    }
  }
  return text;
}

class Trainer {
 public:
  Trainer(const TrainingOptions& options, Run& run)
      : o_(options),
        run_(run),
        trained_(trained_parameters(run.parameters, options.optimizer, options.parameter_groups)),
        optimizer_(options.optimizer.make(trained_)),
        loss_scale_(options.precision),
        early_stopping_(options.early_stopping),
        checkpoints_(run.folder / "checkpoints"),
        metrics_(run.folder / "metrics.jsonl"),
        steps_per_epoch_(options.steps_per_epoch(run.num_examples)),
        num_steps_(options.num_steps(run.num_examples)) {
    for (const auto& [name, p] : run.parameters) p.set_requires_grad(false);
    for (const auto& p : trained_) p.value.set_requires_grad(true);
    if (options.average_decay) average_.emplace(trained_, *options.average_decay);
  }

  TrainingResult train() {
    start_or_resume();
    started_ = Clock::now();
    first_step_ = step_;
    try {
      while (true) {
        if (evaluation_is_due() && evaluated_step_ != step_) evaluate_and_save();
        if (step_ == num_steps_ || stops_early()) break;
        throw_if_interrupted();
        train_step();
        if (o_.save_every > 0 && step_ % o_.save_every == 0 && !evaluation_is_due()) save();
      }
    } catch (const Interrupted&) {
      save_interrupted();
      throw;
    }
    run_.read_model(checkpoints_.best());
    return {step_, best_step_, best_, last_, stops_early() && step_ < num_steps_};
  }

 private:
  bool evaluation_is_due() const {
    if (step_ == num_steps_) return true;
    if (step_ == 0) return false;
    return step_ % (o_.evaluate_every > 0 ? o_.evaluate_every : steps_per_epoch_) == 0;
  }

  bool stops_early() const { return early_stopping_ && early_stopping_->should_stop(); }

  void start_or_resume() {
    const auto newest = checkpoints_.newest();
    if (!newest) {
      metrics_.cut(0);
      return;
    }
    run_.read_model(*newest);
    const auto state = checkpoints_.load_state(*newest);
    std::map<std::string, Tensor> moments, streams;
    for (const auto& [name, value] : state.tensors) {
      if (name.starts_with(kOptimizer)) moments.emplace(name.substr(kOptimizer.size()), value);
      if (name.starts_with(kRandom)) streams.emplace(name.substr(kRandom.size()), value);
    }
    optimizer_->restore(moments);
    run_.random->restore(streams);
    loss_scale_.restore(state);
    if (average_) average_->restore(state);
    if (early_stopping_) early_stopping_->restore(state);
    const auto& v = state.values;
    step_ = v.at("step");
    evaluated_step_ = v.at("evaluated_step");
    best_step_ = v.at("best_step");
    best_ = v.at("best");
    last_ = v.at("last");
    window_loss_ = v.at("window_loss");
    window_steps_ = v.at("window_steps");
    metrics_.cut(v.at("metrics_bytes"));
    // A kill may have come between the checkpoint's rename and what follows it.
    if (best_step_ >= 0) checkpoints_.point_best(best_step_);
    checkpoints_.prune(o_.keep_checkpoints, best_step_);
    log::info("resumed at step {}/{}", step_, num_steps_);
  }

  TrainingState state() const {
    TrainingState s;
    for (auto& [name, value] : optimizer_->state()) s.tensors.emplace(kOptimizer + name, value);
    for (auto& [name, value] : run_.random->states()) s.tensors.emplace(kRandom + name, value);
    s.values = {{"step", step_},           {"evaluated_step", evaluated_step_}, {"best_step", best_step_},
                {"best", best_},           {"last", last_},                     {"window_loss", window_loss_},
                {"window_steps", window_steps_}, {"metrics_bytes", metrics_.bytes()}};
    loss_scale_.save(s);
    if (average_) average_->save(s);
    if (early_stopping_) early_stopping_->save(s);
    return s;
  }

  void write_model(const fs::path& folder) {
    const AveragedWeights averaged(average_);
    run_.write_model(folder);
  }

  void save() {
    metrics_.sync();
    checkpoints_.save(step_, state(), [this](const fs::path& folder) { write_model(folder); });
    if (best_step_ >= 0) checkpoints_.point_best(best_step_);
    checkpoints_.prune(o_.keep_checkpoints, best_step_);
  }

  void save_interrupted() {
    if (step_ == 0) return;
    if (!fs::exists(run_.folder / "checkpoints" / fmt::format("step-{}", step_))) {
      checkpoints_.save_interrupted(step_, state(), [this](const fs::path& folder) { write_model(folder); });
    }
    log::info("saved at step {}; continue with --resume", step_);
  }

  void evaluate_and_save() {
    const auto start = Clock::now();
    const auto evaluation = [this] {
      const AveragedWeights averaged(average_);
      return run_.evaluate();
    }();
    last_ = evaluation.selected;
    const bool better = best_step_ < 0 || (run_.higher_is_better ? last_ > best_ : last_ < best_);
    if (better) {
      best_ = last_;
      best_step_ = step_;
    }
    evaluated_step_ = step_;
    if (early_stopping_) early_stopping_->observe(last_, run_.higher_is_better);
    io::Json line{{"step", step_}, {"evaluation", evaluation.metrics}};
    metrics_.append(line);
    if (run_.observe) run_.observe(line);
    time_line({{"step", step_}, {"evaluation_s", seconds_since(start)}});
    log::info("step {:>5}/{} | {} | {}", step_, num_steps_, evaluation_text(evaluation.metrics),
              better ? "best so far" : fmt::format("best was {:.4f} at step {}", best_, best_step_));
    save();
    if (stops_early() && step_ < num_steps_) log::info("stopped early: evaluations gain no more");
  }

  void train_step() {
    const auto epoch = step_ / steps_per_epoch_;
    const auto per_step = static_cast<std::size_t>(o_.batch_size * o_.gradient_accumulation);
    if (epoch != order_epoch_) {
      order_ = epoch_order(static_cast<std::size_t>(run_.num_examples), run_.seed, epoch,
                           o_.length_bucketing ? run_.lengths : std::vector<std::int64_t>{}, per_step);
      order_epoch_ = epoch;
    }
    const auto begin = static_cast<std::size_t>(step_ % steps_per_epoch_) * per_step;
    const std::span<const std::size_t> examples(order_.begin() + static_cast<std::ptrdiff_t>(begin),
                                                std::min(per_step, order_.size() - begin));
    const auto streams_before = run_.random->states();
    try {
      accumulate(examples, epoch);
    } catch (const Interrupted&) {
      // Half a step is no place to stop: as if it had not begun.
      run_.random->restore(streams_before);
      throw;
    }
    loss_scale_.unscale(trained_);
    const auto norm = clip_gradients(trained_, o_.max_grad_norm);
    const bool skipped = std::isfinite(loss_) && loss_scale_.overflowed(std::isfinite(norm));
    if (!skipped && !(std::isfinite(loss_) && std::isfinite(norm))) stop_not_finite(examples, epoch, streams_before);
    const auto lr = skipped ? 0.0 : optimizer_->step(o_.schedule.factor(step_, num_steps_));
    if (average_) average_->update();
    ++step_;
    examples_seen_ += static_cast<std::int64_t>(examples.size());
    window_loss_ += loss_;
    ++window_steps_;
    report(norm, lr);
  }

  /// Leaves the gradient of the mean loss over all examples of the step.
  void accumulate(std::span<const std::size_t> examples, std::int64_t epoch) {
    zero_gradients(trained_);
    if (run_.experts != nullptr) run_.experts->begin(/*training=*/true, run_.random);
    const auto units = run_.count_units(examples, epoch);
    const auto size = static_cast<std::size_t>(o_.batch_size);
    const auto num_batches = static_cast<double>((examples.size() + size - 1) / size);
    Tensor total;
    for (std::size_t at = 0; at < examples.size(); at += size) {
      throw_if_interrupted();
      nn::ForwardContext context{
          .training = true, .random = run_.random, .recompute_blocks = o_.activation_checkpointing};
      auto loss = loss_sum(examples.subspan(at, std::min(size, examples.size() - at)), epoch, context) / units;
      total = total.defined() ? total + loss.detach() : loss.detach();
      // A balance loss belongs to its micro-batch: the step takes their mean.
      for (const auto& auxiliary : context.auxiliary_losses) loss = loss + auxiliary / num_batches;
      loss_scale_.scaled(loss).backward();
    }
    if (run_.experts != nullptr) run_.experts->finish_backward();
    loss_ = total.item<double>();
  }

  Tensor loss_sum(std::span<const std::size_t> examples, std::int64_t epoch, nn::ForwardContext& context) {
    const tensor::Autocast precision(trained_[0].value.device().type(), o_.precision);
    return run_.loss_sum(examples, epoch, context);
  }

  [[noreturn]] void stop_not_finite(std::span<const std::size_t> examples, std::int64_t epoch,
                                    const std::map<std::string, Tensor>& streams_before) {
    std::string culprit;
    const auto look = [&](std::string_view name, const Tensor& t) {
      if (culprit.empty() && !t.isfinite().all().item<bool>()) culprit = name;
    };
    for (const auto& [name, p] : run_.parameters) look(name, p);
    if (culprit.empty()) {  // the same forward pass again, watched
      run_.random->restore(streams_before);
      const torch::NoGradGuard no_grad;
      if (run_.experts != nullptr) run_.experts->begin(true, run_.random);
      nn::ForwardContext context{.training = true, .random = run_.random, .probe = look};
      const auto size = static_cast<std::size_t>(o_.batch_size);
      for (std::size_t at = 0; at < examples.size() && culprit.empty(); at += size) {
        look("loss", loss_sum(examples.subspan(at, std::min(size, examples.size() - at)), epoch, context));
      }
    }
    if (culprit.empty()) {
      for (const auto& p : trained_) {
        if (p.value.grad().defined()) look("the gradient of " + p.name, p.value.grad());
      }
    }
    throw GuardError(fmt::format(
        "step {}: the loss or gradient is not finite (loss {}); first tensor that is not: {}; {}lower "
        "/training/optimizer/learning_rate, or check the data and the checkpoint",
        step_, std::isnan(loss_) ? std::string("nan") : fmt::format("{}", loss_), culprit.empty() ? "none any more" : culprit,
        o_.precision == at::kHalf ? "float16 ends at 65504: set /training/precision to bfloat16, " : ""));
  }

  void report(double norm, double lr) {
    const double seconds = seconds_since(started_);
    const double rate = static_cast<double>(examples_seen_) / seconds;
    const double left = seconds / static_cast<double>(step_ - first_step_) * static_cast<double>(num_steps_ - step_);
    const auto line = [&](double loss) {
      return fmt::format("step {:>5}/{} | loss {:.4f} | grad_norm {:.3f} | lr {:.2e} | {:.0f} examples/s | {} left{}",
                         step_, num_steps_, loss, norm, lr, rate, duration_text(left),
                         run_.memory ? " | " + run_.memory() : "");
    };
    const auto bar = [&] {
      constexpr std::int64_t kWidth = 16;
      const auto filled = static_cast<std::size_t>(kWidth * step_ / num_steps_);
      return "[" + std::string(filled, '#') + std::string(kWidth - filled, '.') + "] ";
    };
    if (step_ % o_.log_every == 0 || step_ == num_steps_) {
      const auto mean_loss = window_loss_ / static_cast<double>(window_steps_);
      window_loss_ = 0.0;
      window_steps_ = 0;
      io::Json logged{{"step", step_},
                      {"epoch", static_cast<double>(step_) / static_cast<double>(steps_per_epoch_)},
                      {"loss", mean_loss},
                      {"grad_norm", norm},
                      {"learning_rate", lr}};
      metrics_.append(logged);
      logged["examples_per_s"] = rate;
      if (run_.observe) run_.observe(logged);
      time_line({{"step", step_}, {"seconds", seconds}, {"examples_per_s", rate}});
      if (!log::status(bar() + line(mean_loss))) log::info("{}", line(mean_loss));
    } else {
      log::status(bar() + line(loss_));
    }
  }

  void time_line(const io::Json& line) const {
    std::ofstream(run_.folder / "timing.jsonl", std::ios::app) << line.dump() << "\n";
  }

  const TrainingOptions& o_;
  Run& run_;
  const std::vector<TrainedParameter> trained_;
  std::unique_ptr<Optimizer> optimizer_;
  LossScale loss_scale_;
  std::optional<WeightAverage> average_;
  std::optional<EarlyStopping> early_stopping_;
  CheckpointFolders checkpoints_;
  MetricsFile metrics_;
  const std::int64_t steps_per_epoch_, num_steps_;

  std::int64_t step_ = 0, evaluated_step_ = -1, best_step_ = -1;
  double best_ = 0.0, last_ = 0.0;
  double window_loss_ = 0.0;
  std::int64_t window_steps_ = 0;

  std::vector<std::size_t> order_;
  std::int64_t order_epoch_ = -1;
  double loss_ = 0.0;

  Clock::time_point started_;
  std::int64_t first_step_ = 0, examples_seen_ = 0;
};

}  // namespace

TrainingResult train(const TrainingOptions& options, Run& run) { return Trainer(options, run).train(); }

}  // namespace mergex::training
