#include "memory_estimate.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace mergex::engine {
namespace fs = std::filesystem;

namespace {

// What was measured rather than derived; the runs are in docs/finetune.md, "Memory".
constexpr double kProcessBytes = 0.30 * (1 << 30);  // program, LibTorch's pages and tables, tokenizer
constexpr double kGpuContextBytes = 0.60 * (1 << 30);
constexpr double kBytesPerExample = 300.0, kBytesPerToken = 12.0;  // text and ids
constexpr double kActivationOverhead = 1.2;  // gaps between blocks of many sizes, and what kernels make on the way

// Of one merged linear, in multiples of its task vectors [N, O, I].
constexpr double kTermsKept = 1.0;          // alpha gamma, from the start of a step to its end
constexpr double kTermGradient = 1.0;       // added up in place over the micro-batches
constexpr double kTermWorkSpace = 3.0;      // task vectors, mask and a buffer, one layer at a time
constexpr double kUnitsAtOnce = 1.0;        // merged weights [O, I] that exist at a time

// Work space of a forward or backward pass, beside what is kept.
constexpr double kScoreBuffers = 4.0;   // [B, heads, T, S]
constexpr double kHiddenBuffers = 3.0;  // [B, T, d_ff]
constexpr double kLogitBuffers = 4.0;   // [B, U, vocab]: logits, their logarithms, and the gradients of both

/// Bytes that autograd keeps of a T5, by stack.
class Activations {
 public:
  Activations(const MemoryFactors& f, const BatchShape& batch)
      : c_(f.shape),
        wide_(static_cast<double>(f.bytes_per_value)),
        narrow_(f.half_precision ? 2.0 : wide_),
        drops_(c_.dropout_rate > 0.0),
        source_(static_cast<double>(batch.size * batch.length)),
        target_(static_cast<double>(batch.size * batch.decoder_length)),
        source_length_(static_cast<double>(batch.length)),
        target_length_(static_cast<double>(batch.decoder_length)) {}

  double encoder_block() const { return source_ * (attention(source_length_) + feed_forward()); }

  double decoder_block() const {
    // Keys and values of the cross attention are the encoder's tokens'.
    return target_ * (attention(target_length_) + attention(source_length_) - 2.0 * inner() * narrow_ + feed_forward()) +
           source_ * 2.0 * inner() * narrow_;
  }

  /// Embedding and last norm of both stacks.
  double ends() const { return (source_ + target_) * (norm() + (drops_ ? 2.0 * d() * wide_ : 0.0)); }

  /// The states between blocks, all that checkpointing keeps.
  double block_inputs() const {
    return wide_ * d() * (source_ * static_cast<double>(c_.num_layers) + target_ * static_cast<double>(c_.num_decoder_layers));
  }

  double work_space() const {
    const double heads = static_cast<double>(c_.num_heads);
    const double scores = std::max(source_ * source_length_, target_ * std::max(target_length_, source_length_)) * heads;
    return wide_ * (kScoreBuffers * scores + kHiddenBuffers * std::max(source_, target_) * static_cast<double>(c_.d_ff));
  }

  double logits() const { return kLogitBuffers * wide_ * target_ * static_cast<double>(c_.vocab_size); }

  /// A sparse mixture keeps, for each expert that a token goes to, the token and the output.
  double mixture(const ExpertShape& e) const {
    return source_ * narrow_ * static_cast<double>(e.top_k * (e.in_features + e.out_features));
  }

 private:
  double d() const { return static_cast<double>(c_.d_model); }
  double inner() const { return static_cast<double>(c_.num_heads * c_.d_kv); }

  // Per token: input, normalised input, scaled output.
  double norm() const { return d() * (2.0 * wide_ + narrow_); }

  double attention(double num_keys) const {
    // Queries, keys, values and the mixed values; probabilities, and with dropout its mask and what it leaves.
    const double probabilities = wide_ + (drops_ ? 2.0 * narrow_ : narrow_ < wide_ ? narrow_ : 0.0);
    return norm() + 4.0 * inner() * narrow_ + static_cast<double>(c_.num_heads) * num_keys * probabilities +
           (drops_ ? d() * narrow_ : 0.0);
  }

  double feed_forward() const {
    const double dropped = drops_ ? 2.0 : 0.0;  // the mask and what it leaves
    double hidden = 1.0 + dropped;              // relu remembers its output
    if (c_.is_gated) {
      hidden = 3.0 + (drops_ ? dropped : 1.0);  // both projections and the activated one; the product
    } else if (c_.activation != backbones::T5Config::Activation::kRelu) {
      hidden = 1.0 + (drops_ ? dropped : 1.0);  // others remember their input
    }
    return norm() + hidden * static_cast<double>(c_.d_ff) * narrow_ + (drops_ ? d() * narrow_ : 0.0);
  }

  const backbones::T5Config& c_;
  double wide_, narrow_;
  bool drops_;
  double source_, target_;  // tokens
  double source_length_, target_length_;
};

/// A number in a file of /proc or /sys; none where there is no such file or it says "max".
std::optional<std::int64_t> number_in(const fs::path& file, const std::string& key = "") {
  std::ifstream in(file);
  std::string word;
  std::int64_t value = 0;
  if (key.empty()) return in >> value ? std::optional(value) : std::nullopt;
  while (in >> word) {
    if (word == key && in >> value) return value;
  }
  return std::nullopt;
}

/// What a control group and those above it still allow. Pages of files count as used there but give way.
void limit_by_group(std::optional<std::int64_t>& available, const fs::path& mount, fs::path group, const char* limit_name,
                    const char* used_key) {
  while (true) {
    const auto folder = mount / group.relative_path();
    if (const auto limit = number_in(folder / limit_name)) {
      const auto used = number_in(folder / "memory.stat", used_key).value_or(0);
      available = std::min(available.value_or(*limit), std::max<std::int64_t>(0, *limit - used));
    }
    if (!group.has_relative_path()) break;
    group = group.parent_path();
  }
}

}  // namespace

MemoryEstimate estimate_memory(const MemoryFactors& f) {
  const double value = static_cast<double>(f.bytes_per_value);
  const double parameters = value * static_cast<double>(f.num_parameters);
  const double moments = value * static_cast<double>(f.adafactor ? f.num_factored : 2 * f.num_parameters);
  const double averages = (f.averages_weights ? parameters : 0.0) + (f.half_precision ? 0.5 * parameters : 0.0);
  const double embedding = value * static_cast<double>(f.shape.vocab_size * f.shape.d_model);

  double terms = 0.0, largest_terms = 0.0, largest_unit = 0.0, expert_parameters = 0.0;
  for (const auto& e : f.experts) {
    const double unit = value * static_cast<double>(e.out_features * e.in_features);
    const double all = unit * static_cast<double>(e.num_experts);
    if (!e.merges) continue;
    expert_parameters += all;
    terms += all;
    largest_terms = std::max(largest_terms, all);
    largest_unit = std::max(largest_unit, unit);
  }
  const double term_space = kTermWorkSpace * largest_terms + kUnitsAtOnce * largest_unit;

  const Activations training(f, f.training);
  const double encoder = static_cast<double>(f.shape.num_layers) * training.encoder_block();
  const double decoder = static_cast<double>(f.shape.num_decoder_layers) * training.decoder_block();
  double mixtures = 0.0;
  for (const auto& e : f.experts) mixtures += e.merges ? 0.0 : training.mixture(e);
  double kept = encoder + decoder + mixtures;
  if (f.activation_checkpointing) {
    const auto num_blocks = static_cast<double>(f.shape.num_layers + f.shape.num_decoder_layers);
    kept = training.block_inputs() + std::max(training.encoder_block(), training.decoder_block()) + mixtures / num_blocks;
  }
  kept += training.ends();
  const double activations =
      kActivationOverhead * (kept + training.work_space() + (f.language_model ? training.logits() : 0.0));

  // In the backward pass gradients take the place of activations, unless earlier micro-batches have left theirs.
  // Those of experts come after it, when the pass has given up everything else. The embedding's is made twice, once a
  // stack, and added.
  const double gradients = parameters;
  const double pass_gradients = gradients - expert_parameters + kTermGradient * terms;
  const double pass = f.gradient_accumulation > 1 ? activations + pass_gradients : std::max(activations, pass_gradients);
  const double after_pass = gradients + kTermGradient * terms;
  const double step = kTermsKept * terms + term_space + std::max(pass + embedding, after_pass);

  const Activations evaluating(f, f.evaluation);
  const double evaluation = gradients + kTermsKept * terms + term_space + evaluating.work_space() +
                            (f.language_model ? 0.5 * evaluating.logits() : 0.0);

  const double process = f.on_gpu ? kGpuContextBytes
                                  : kProcessBytes + kBytesPerExample * static_cast<double>(f.num_examples) +
                                        kBytesPerToken * static_cast<double>(f.num_data_tokens);
  const auto bytes = [](double x) { return static_cast<std::int64_t>(x); };
  return {.parameters = bytes(parameters + averages),
          .gradients = bytes(gradients),
          .moments = bytes(moments),
          .merging = bytes((kTermsKept + kTermGradient) * terms + term_space),
          .activations = bytes(activations),
          .process = bytes(process),
          .peak = bytes(process + parameters + averages + moments + std::max(step, evaluation))};
}

std::optional<std::int64_t> available_memory(const fs::path& root) {
  auto available = number_in(root / "proc/meminfo", "MemAvailable:");
  if (available) *available *= 1024;
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // hierarchy:controllers:path, with no controllers for version 2
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const auto controllers = line.substr(first + 1, second - first - 1);
    const fs::path group(line.substr(second + 1));
    if (controllers.empty()) {
      limit_by_group(available, root / "sys/fs/cgroup", group, "memory.max", "anon");
    } else if (controllers == "memory") {
      limit_by_group(available, root / "sys/fs/cgroup/memory", group, "memory.limit_in_bytes", "total_rss");
    }
  }
  return available;
}

std::optional<std::int64_t> available_gpu_memory(int index) {
  // The CUDA runtime comes with LibTorch's CUDA part, which is loaded by now; the program itself does not link it.
  using SetDevice = int (*)(int);
  using MemGetInfo = int (*)(std::size_t*, std::size_t*);
  const auto set_device = reinterpret_cast<SetDevice>(dlsym(RTLD_DEFAULT, "cudaSetDevice"));
  const auto get_info = reinterpret_cast<MemGetInfo>(dlsym(RTLD_DEFAULT, "cudaMemGetInfo"));
  std::size_t free = 0, total = 0;
  if (set_device == nullptr || get_info == nullptr || set_device(index) != 0 || get_info(&free, &total) != 0) {
    return std::nullopt;
  }
  return static_cast<std::int64_t>(free);
}

std::vector<std::string> memory_repairs(const MemoryFactors& factors, std::int64_t available) {
  std::vector<std::string> repairs;
  auto now = factors;
  const auto fits = [&] { return estimate_memory(now).peak <= available; };
  const auto try_change = [&](const MemoryFactors& changed, const std::string& text) {
    if (fits()) return;
    const auto before = estimate_memory(now).peak;
    // A change that saves next to nothing is not worth what it costs.
    if (estimate_memory(changed).peak > before - before / 50) return;
    now = changed;
    repairs.push_back(text);
  };

  auto smaller = now;
  while (smaller.training.size > 1 && estimate_memory(smaller).peak > available) {
    smaller.training.size = (smaller.training.size + 1) / 2;
    smaller.gradient_accumulation = now.gradient_accumulation * now.training.size / smaller.training.size;
  }
  try_change(smaller, fmt::format("/training/batch_size={} with /training/gradient_accumulation={}", smaller.training.size,
                                  smaller.gradient_accumulation));
  auto checkpointed = now;
  checkpointed.activation_checkpointing = true;
  try_change(checkpointed, "/training/activation_checkpointing=true");
  auto factored = now;
  factored.adafactor = true;
  try_change(factored, "/training/optimizer/name=adafactor");
  if (!now.experts.empty()) {
    auto fewer = now;
    while (fewer.experts[0].num_experts > 2 && estimate_memory(fewer).peak > available) {
      for (auto& e : fewer.experts) {
        const auto left = (e.num_experts + 1) / 2;
        const auto dropped = (e.num_experts - left) * e.out_features * e.in_features;
        fewer.num_parameters -= dropped;
        e.num_experts = left;
      }
    }
    try_change(fewer, fmt::format("/experts/num_experts={}", fewer.experts[0].num_experts));
  }
  if (!fits()) repairs.emplace_back("a smaller model or more memory");
  return repairs;
}

std::string size_text(std::int64_t bytes) {
  const auto gib = static_cast<double>(bytes) / (1 << 30);
  return gib < 0.1 ? fmt::format("{:.0f} MiB", gib * 1024.0) : fmt::format("{:.1f} GiB", gib);
}

}  // namespace mergex::engine
