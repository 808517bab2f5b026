#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "backbones/t5.h"

namespace mergex::engine {

/// A linear with experts, as far as memory goes.
struct ExpertShape {
  std::int64_t num_experts = 0, out_features = 0, in_features = 0;
  bool merges = false;  ///< one weight per sentence from task vectors (camex); else tokens go to `top_k` experts
  std::int64_t top_k = 0;
  std::int64_t curvature_rank = 0;  ///< 0: none
};

/// Sentences of one forward pass, all as long as the longest.
struct BatchShape {
  std::int64_t size = 0;
  std::int64_t length = 0;          ///< tokens that the encoder reads
  std::int64_t decoder_length = 0;  ///< tokens that the decoder reads
};

/// All that decides how much memory a run needs.
struct MemoryFactors {
  backbones::T5Config shape = {};
  bool language_model = false;
  std::int64_t num_parameters = 0;      ///< of the whole model
  std::int64_t num_factored = 0;        ///< numbers that Adafactor keeps for them
  std::int64_t bytes_per_value = 4;     ///< of a parameter
  std::vector<ExpertShape> experts = {};
  BatchShape training = {}, evaluation = {};
  std::int64_t gradient_accumulation = 1;
  bool adafactor = false;               ///< else AdamW
  bool activation_checkpointing = false;
  bool half_precision = false;          ///< products in bfloat16 or float16
  bool averages_weights = false;
  std::int64_t num_data_tokens = 0, num_examples = 0;
  bool on_gpu = false;
};

/// Bytes of a run at its peak, by what they are for.
struct MemoryEstimate {
  std::int64_t parameters = 0;   ///< and their running average, where there is one
  std::int64_t gradients = 0;
  std::int64_t moments = 0;
  std::int64_t merging = 0;      ///< curved task vectors, their gradients, and what is computed on the way
  std::int64_t activations = 0;  ///< of the largest training batch, kept for the backward pass, and work space
  std::int64_t process = 0;      ///< program, libraries, data
  std::int64_t peak = 0;         ///< not the sum: gradients take the place of activations
};

/// The formula is in docs/finetune.md, section "Memory", with how far measured runs were from it.
MemoryEstimate estimate_memory(const MemoryFactors& factors);

/// Bytes that this process may still take: of the machine (MemAvailable) and of the control groups that it is in,
/// whichever is less. @param root  for tests: where /proc and /sys are looked for
std::optional<std::int64_t> available_memory(const std::filesystem::path& root = "/");
/// Free bytes of a GPU; none where its runtime library does not say.
std::optional<std::int64_t> available_gpu_memory(int index);

/// Changes of the recipe, from the cheapest on, that together make the run fit; without those that save nothing. The
/// last one says so where even all of them do not.
std::vector<std::string> memory_repairs(const MemoryFactors& factors, std::int64_t available);

/// `3.1 GiB`
std::string size_text(std::int64_t bytes);

}  // namespace mergex::engine
