#include "backbones/t5_config.h"

#include <memory>

#include "io/json_object.h"

namespace mergex::backbones {

T5Config T5Config::read(const io::Json& json, const std::string& origin) {
  auto document = std::make_shared<io::JsonDocument>();
  document->value = json;
  document->file = origin;
  io::JsonObject config(document);
  const io::Range positive{.at_least = 1, .at_most = 1e7};
  T5Config c;
  c.vocab_size = config.required<std::int64_t>("vocab_size", positive);
  c.d_model = config.required<std::int64_t>("d_model", positive);
  c.d_kv = config.required<std::int64_t>("d_kv", positive);
  c.d_ff = config.required<std::int64_t>("d_ff", positive);
  c.num_layers = config.required<std::int64_t>("num_layers", {.at_least = 1, .at_most = 1000});
  c.num_heads = config.required<std::int64_t>("num_heads", positive);
  c.num_decoder_layers = c.num_layers;
  if (!config.peek("num_decoder_layers").is_null()) {
    config.optional("num_decoder_layers", c.num_decoder_layers, {.at_least = 1, .at_most = 1000});
  }
  config.optional("relative_attention_num_buckets", c.relative_attention_num_buckets, {.at_least = 4, .at_most = 1e6});
  config.optional("relative_attention_max_distance", c.relative_attention_max_distance,
                  {.above = static_cast<double>(c.relative_attention_num_buckets) / 4, .at_most = 1e7});
  config.optional("dropout_rate", c.dropout_rate, {.at_least = 0, .below = 1});
  config.optional("classifier_dropout", c.classifier_dropout, {.at_least = 0, .below = 1});
  config.optional("layer_norm_epsilon", c.layer_norm_epsilon, {.above = 0});
  config.optional("initializer_factor", c.initializer_factor, {.above = 0});
  config.optional("pad_token_id", c.pad_token_id, {.at_least = 0});
  config.optional("eos_token_id", c.eos_token_id, {.at_least = 0});
  c.decoder_start_token_id = c.pad_token_id;
  if (!config.peek("decoder_start_token_id").is_null()) {
    config.optional("decoder_start_token_id", c.decoder_start_token_id, {.at_least = 0});
  }

  // "relu", "gated-gelu", "gated-silu", ...; transformers reads "gated-gelu" as the tanh form of gelu.
  std::string projection = "relu";
  config.optional("feed_forward_proj", projection);
  c.is_gated = projection.starts_with("gated-");
  const auto activation = c.is_gated ? projection.substr(6) : projection;
  if (activation == "relu") {
    c.activation = Activation::kRelu;
  } else if (activation == "gelu_new" || (c.is_gated && activation == "gelu")) {
    c.activation = Activation::kGeluNew;
  } else if (activation == "gelu") {
    c.activation = Activation::kGelu;
  } else if (activation == "silu" || activation == "swish") {
    c.activation = Activation::kSilu;
  } else {
    config.fail_value("feed_forward_proj", "expected relu, gelu, gelu_new, silu, or gated- before one of them");
  }

  // transformers 5 writes tie_word_embeddings: true for every T5 and keeps the truth in scale_decoder_outputs.
  config.optional("tie_word_embeddings", c.tied);
  config.optional("scale_decoder_outputs", c.tied);
  return c;
}

}  // namespace mergex::backbones
