#pragma once

#include <cstdint>
#include <string>

#include "io/json.h"

namespace mergex::backbones {

/// config.json of a T5 in either spelling (transformers 4 and 5).
struct T5Config {
  std::int64_t vocab_size = 32128;
  std::int64_t d_model = 512, d_kv = 64, d_ff = 2048;
  std::int64_t num_layers = 6, num_decoder_layers = 6, num_heads = 8;
  std::int64_t relative_attention_num_buckets = 32, relative_attention_max_distance = 128;
  double dropout_rate = 0.1, classifier_dropout = 0.0, layer_norm_epsilon = 1e-6, initializer_factor = 1.0;
  bool is_gated = false;
  enum class Activation { kRelu, kGeluNew, kGelu, kSilu } activation = Activation::kRelu;
  /// v1.0: the head is the embedding, and decoder states are scaled by d_model^-0.5 before it.
  bool tied = true;
  std::int64_t pad_token_id = 0, eos_token_id = 1, decoder_start_token_id = 0;

  /// @throws UserError naming file and key
  static T5Config read(const io::Json& config, const std::string& origin);
};

}  // namespace mergex::backbones
