#include "backbones/t5.h"

#include <torch/torch.h>

#include <cmath>

#include "core/error.h"
#include "nn/recompute.h"
#include "nn/relative_position.h"
#include "tensor/convert.h"

// B batch, T positions of the stack that runs, S positions attended to, D d_model, F d_ff, N heads, K d_kv, V vocab_size
namespace mergex::backbones {

namespace {

using nn::ForwardContext;

/// Keys and values of one attention, kept while a text is generated.
struct KeyValue {
  Tensor key_BNSK, value_BNSK;
};

struct T5Attention : torch::nn::Module {
  T5Attention(const T5Config& c, const at::TensorOptions& options, bool has_relative_bias, bool bidirectional_)
      : num_heads(c.num_heads),
        d_kv(c.d_kv),
        num_buckets(c.relative_attention_num_buckets),
        max_distance(c.relative_attention_max_distance),
        dropout_rate(c.dropout_rate),
        bidirectional(bidirectional_),
        q(register_module("q", std::make_shared<nn::Linear>(c.d_model, c.num_heads * c.d_kv, options))),
        k(register_module("k", std::make_shared<nn::Linear>(c.d_model, c.num_heads * c.d_kv, options))),
        v(register_module("v", std::make_shared<nn::Linear>(c.d_model, c.num_heads * c.d_kv, options))),
        o(register_module("o", std::make_shared<nn::Linear>(c.num_heads * c.d_kv, c.d_model, options))) {
    if (has_relative_bias) {
      relative_attention_bias =
          register_module("relative_attention_bias", std::make_shared<nn::Linear>(c.num_heads, num_buckets, options));
    }
  }

  /// Learned bias by relative position, for queries at `first_query` .. `first_query + T - 1`: [1, N, T, S].
  Tensor position_bias(std::int64_t first_query, std::int64_t num_queries, std::int64_t num_keys) const {
    const auto ints = torch::TensorOptions(at::kLong).device(relative_attention_bias->weight.device());
    const auto query_T1 = torch::arange(first_query, first_query + num_queries, ints).unsqueeze(1);
    const auto key_1S = torch::arange(num_keys, ints).unsqueeze(0);
    const auto bucket_TS =
        nn::relative_position_bucket(key_1S - query_T1, bidirectional, num_buckets, max_distance);
    return torch::embedding(relative_attention_bias->weight, bucket_TS).permute({2, 0, 1}).unsqueeze(0);
  }

  KeyValue key_value(const Tensor& source_BSD, ForwardContext& context) {
    return {split_heads(k->forward(source_BSD, context)), split_heads(v->forward(source_BSD, context))};
  }

  /// @param bias_1NTS  added to the scores; masks are already in it
  Tensor forward(const Tensor& x_BTD, const KeyValue& kv, const Tensor& bias_1NTS, ForwardContext& context) {
    // No division by sqrt(K): T5 folds that scale into the initial weights.
    const auto query_BNTK = split_heads(q->forward(x_BTD, context));
    auto scores_BNTS = torch::matmul(query_BNTK, kv.key_BNSK.transpose(-1, -2));
    if (bias_1NTS.defined()) scores_BNTS = scores_BNTS + bias_1NTS;
    const auto wide = at::promote_types(scores_BNTS.scalar_type(), at::kFloat);
    auto weights_BNTS = torch::softmax(scores_BNTS.to(wide), -1).to(scores_BNTS.scalar_type());
    weights_BNTS = nn::dropout(weights_BNTS, dropout_rate, context);
    const auto mixed_BTNK = torch::matmul(weights_BNTS, kv.value_BNSK).transpose(1, 2);
    return o->forward(mixed_BTNK.reshape({x_BTD.size(0), x_BTD.size(1), num_heads * d_kv}), context);
  }

  std::int64_t num_heads, d_kv, num_buckets, max_distance;
  double dropout_rate;
  bool bidirectional;
  std::shared_ptr<nn::Linear> q, k, v, o;
  std::shared_ptr<nn::Linear> relative_attention_bias;  // a table [num_buckets, N], in the first block of a stack only

 private:
  Tensor split_heads(const Tensor& x) const {
    return x.view({x.size(0), x.size(1), num_heads, d_kv}).transpose(1, 2);
  }
};

/// The lowest finite number of a floating dtype.
double lowest(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble: return std::numeric_limits<double>::lowest();
    case at::kFloat: return std::numeric_limits<float>::lowest();
    case at::kBFloat16: return static_cast<double>(std::numeric_limits<c10::BFloat16>::lowest());
    default: throw std::logic_error("a model in a dtype that is no floating one");
  }
}

Tensor activate(const Tensor& x, T5Config::Activation activation) {
  switch (activation) {
    case T5Config::Activation::kRelu: return torch::relu(x);
    case T5Config::Activation::kGeluNew: return at::gelu(x, "tanh");
    case T5Config::Activation::kGelu: return at::gelu(x);
    case T5Config::Activation::kSilu: return at::silu(x);
  }
  throw std::logic_error("unknown activation");
}

/// `wi -> activation -> dropout -> wo`, or with a gate `activation(wi_0) * wi_1` (Shazeer 2020).
struct T5FeedForward : nn::FeedForward {
  T5FeedForward(const T5Config& c, const at::TensorOptions& options)
      : dropout_rate(c.dropout_rate), activation(c.activation) {
    const auto add = [&](const std::string& name, std::int64_t in, std::int64_t out) {
      names.push_back(name);
      slots.push_back(register_module(name, std::make_shared<nn::Linear>(in, out, options)));
    };
    if (c.is_gated) {
      add("wi_0", c.d_model, c.d_ff);
      add("wi_1", c.d_model, c.d_ff);
    } else {
      add("wi", c.d_model, c.d_ff);
    }
    add("wo", c.d_ff, c.d_model);
  }

  Tensor forward(const Tensor& x_BTD, ForwardContext& context) override {
    auto hidden_BTF = activate(slots[0]->forward(x_BTD, context), activation);
    if (slots.size() == 3) hidden_BTF = hidden_BTF * slots[1]->forward(x_BTD, context);
    hidden_BTF = nn::dropout(hidden_BTF, dropout_rate, context);
    auto y_BTD = slots.back()->forward(hidden_BTF, context);
    context.observe(place, y_BTD);
    return y_BTD;
  }

  std::vector<std::string> projection_names() const override { return names; }
  std::shared_ptr<nn::Projection>& projection(const std::string& name) override {
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (names[i] == name) return slots[i];
    }
    throw std::logic_error("no projection " + name);
  }

  std::string place;  // its name in the model
  double dropout_rate;
  T5Config::Activation activation;
  std::vector<std::string> names;
  std::vector<std::shared_ptr<nn::Projection>> slots;
};

// Hugging Face nests each sub-layer as layer.N with its own norm; these three carry the names.
struct SelfAttentionLayer : torch::nn::Module {
  SelfAttentionLayer(const T5Config& c, const at::TensorOptions& options, bool has_bias, bool bidirectional)
      : attention(register_module("SelfAttention",
                                  std::make_shared<T5Attention>(c, options, has_bias, bidirectional))),
        layer_norm(register_module("layer_norm",
                                   std::make_shared<nn::RmsNorm>(c.d_model, c.layer_norm_epsilon, options))) {}
  std::shared_ptr<T5Attention> attention;
  std::shared_ptr<nn::RmsNorm> layer_norm;
};

struct CrossAttentionLayer : torch::nn::Module {
  CrossAttentionLayer(const T5Config& c, const at::TensorOptions& options)
      : attention(register_module("EncDecAttention", std::make_shared<T5Attention>(c, options, false, true))),
        layer_norm(register_module("layer_norm",
                                   std::make_shared<nn::RmsNorm>(c.d_model, c.layer_norm_epsilon, options))) {}
  std::shared_ptr<T5Attention> attention;
  std::shared_ptr<nn::RmsNorm> layer_norm;
};

struct FeedForwardLayer : torch::nn::Module {
  FeedForwardLayer(const T5Config& c, const at::TensorOptions& options)
      : feed_forward(register_module("DenseReluDense", std::make_shared<T5FeedForward>(c, options))),
        layer_norm(register_module("layer_norm",
                                   std::make_shared<nn::RmsNorm>(c.d_model, c.layer_norm_epsilon, options))) {}
  std::shared_ptr<T5FeedForward> feed_forward;
  std::shared_ptr<nn::RmsNorm> layer_norm;
};

/// Caches of one decoder block while generating.
struct BlockCache {
  KeyValue self, cross;
};

struct T5Block : torch::nn::Module {
  T5Block(const T5Config& c, const at::TensorOptions& options, bool is_decoder, bool has_relative_bias)
      : dropout_rate(c.dropout_rate),
        self_attention(std::make_shared<SelfAttentionLayer>(c, options, has_relative_bias, !is_decoder)),
        feed_forward(std::make_shared<FeedForwardLayer>(c, options)) {
    if (is_decoder) cross_attention = std::make_shared<CrossAttentionLayer>(c, options);
    auto layer = std::make_shared<torch::nn::Module>();
    layer->register_module("0", self_attention);
    if (is_decoder) layer->register_module("1", cross_attention);
    layer->register_module(is_decoder ? "2" : "1", feed_forward);
    register_module("layer", layer);
  }

  /// @param cache  decoder while generating: keys and values of earlier positions, extended by this call
  Tensor forward(Tensor x_BTD, const Tensor& self_bias, const Tensor& encoder_BSD, const Tensor& cross_bias,
                 BlockCache* cache, ForwardContext& context) {
    auto normed = self_attention->layer_norm->forward(x_BTD);
    auto kv = self_attention->attention->key_value(normed, context);
    if (cache != nullptr) {
      if (cache->self.key_BNSK.defined()) {
        kv = {torch::cat({cache->self.key_BNSK, kv.key_BNSK}, 2), torch::cat({cache->self.value_BNSK, kv.value_BNSK}, 2)};
      }
      cache->self = kv;
    }
    x_BTD = x_BTD + nn::dropout(self_attention->attention->forward(normed, kv, self_bias, context), dropout_rate, context);

    if (cross_attention) {
      normed = cross_attention->layer_norm->forward(x_BTD);
      KeyValue cross;
      if (cache != nullptr && cache->cross.key_BNSK.defined()) {
        cross = cache->cross;
      } else {
        cross = cross_attention->attention->key_value(encoder_BSD, context);
        if (cache != nullptr) cache->cross = cross;
      }
      x_BTD = x_BTD + nn::dropout(cross_attention->attention->forward(normed, cross, cross_bias, context), dropout_rate,
                                  context);
    }
    normed = feed_forward->layer_norm->forward(x_BTD);
    return x_BTD + nn::dropout(feed_forward->feed_forward->forward(normed, context), dropout_rate, context);
  }

  double dropout_rate;
  std::shared_ptr<SelfAttentionLayer> self_attention;
  std::shared_ptr<CrossAttentionLayer> cross_attention;
  std::shared_ptr<FeedForwardLayer> feed_forward;
};

/// Caches of a decoder: one per block, and how many positions they hold.
struct DecodeState {
  std::vector<BlockCache> blocks;
  std::int64_t length = 0;
};

struct T5Stack : torch::nn::Module {
  T5Stack(const T5Config& c, const at::TensorOptions& options, bool is_decoder_)
      : name(is_decoder_ ? "decoder" : "encoder"),
        is_decoder(is_decoder_),
        dropout_rate(c.dropout_rate),
        final_layer_norm(register_module("final_layer_norm",
                                         std::make_shared<nn::RmsNorm>(c.d_model, c.layer_norm_epsilon, options))) {
    auto block = std::make_shared<torch::nn::Module>();
    for (std::int64_t i = 0; i < (is_decoder ? c.num_decoder_layers : c.num_layers); ++i) {
      // Only the first block owns the position bias; the others add the same one.
      blocks.push_back(block->register_module(std::to_string(i),
                                              std::make_shared<T5Block>(c, options, is_decoder, i == 0)));
      blocks.back()->feed_forward->feed_forward->place =
          fmt::format("{}.block.{}.layer.{}.DenseReluDense", name, i, is_decoder ? 2 : 1);
    }
    register_module("block", block);
  }

  /// @param mask_BT       encoder: real tokens; decoder: undefined, positions only look back
  /// @param encoder_BSD   decoder: what the encoder gave, with its mask `encoder_mask_BS`
  Tensor forward(Tensor x_BTD, const Tensor& mask_BT, const Tensor& encoder_BSD, const Tensor& encoder_mask_BS,
                 DecodeState* state, ForwardContext& context) {
    const auto first = state == nullptr ? 0 : state->length;
    const auto num_queries = x_BTD.size(1), num_keys = first + num_queries;
    auto self_bias = blocks[0]->self_attention->attention->position_bias(first, num_queries, num_keys);
    context.observe(fmt::format("{}.position_bias", name), self_bias);
    if (is_decoder) {
      if (num_queries > 1) {
        const auto ints = torch::TensorOptions(at::kLong).device(x_BTD.device());
        const auto future_TS = torch::arange(num_keys, ints).unsqueeze(0) >
                               torch::arange(first, num_keys, ints).unsqueeze(1);
        self_bias = self_bias + blocked(future_TS, x_BTD);
      }
    } else if (mask_BT.defined()) {
      self_bias = self_bias + blocked((mask_BT == 0).view({mask_BT.size(0), 1, 1, mask_BT.size(1)}), x_BTD);
    }
    Tensor cross_bias;  // cross-attention has no position bias
    if (is_decoder && encoder_mask_BS.defined()) {
      cross_bias = blocked((encoder_mask_BS == 0).view({encoder_mask_BS.size(0), 1, 1, encoder_mask_BS.size(1)}), x_BTD);
    }

    x_BTD = nn::dropout(x_BTD, dropout_rate, context);
    if (state != nullptr) state->blocks.resize(blocks.size());
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      context.observe(fmt::format("{}.hidden.{}", name, i), x_BTD);
      x_BTD = run_block(blocks[i], x_BTD, self_bias, encoder_BSD, cross_bias,
                        state == nullptr ? nullptr : &state->blocks[i], context);
    }
    if (state != nullptr) state->length = num_keys;
    context.observe(fmt::format("{}.prenorm", name), x_BTD);
    x_BTD = nn::dropout(final_layer_norm->forward(x_BTD), dropout_rate, context);
    context.observe(fmt::format("{}.hidden.{}", name, blocks.size()), x_BTD);
    return x_BTD;
  }

  static Tensor run_block(const std::shared_ptr<T5Block>& block, const Tensor& x_BTD, const Tensor& self_bias,
                          const Tensor& encoder_BSD, const Tensor& cross_bias, BlockCache* cache,
                          ForwardContext& context) {
    if (!context.recompute_blocks || !torch::GradMode::is_enabled()) {
      // The alias gathers the gradients of a block's own keys and values before they meet those of other blocks, as
      // recomputation does: the same sums in the same order.
      const auto encoder_here = encoder_BSD.defined() ? encoder_BSD.view_as(encoder_BSD) : encoder_BSD;
      return block->forward(x_BTD, self_bias, encoder_here, cross_bias, cache, context);
    }
    std::vector<Tensor> inputs{x_BTD, self_bias};
    if (encoder_BSD.defined()) inputs.push_back(encoder_BSD);
    if (cross_bias.defined()) inputs.push_back(cross_bias);
    const auto part = [block](std::span<const Tensor> in, ForwardContext& inner) {
      return block->forward(in[0], in[1], in.size() > 2 ? in[2] : Tensor(), in.size() > 3 ? in[3] : Tensor(), nullptr,
                            inner);
    };
    return nn::recomputed(part, inputs, context);
  }

  /// The lowest finite number where `is_blocked`, else 0: -inf would turn rows that may see nothing into NaN.
  static Tensor blocked(const Tensor& is_blocked, const Tensor& like) {
    return torch::zeros(is_blocked.sizes(), like.options().requires_grad(false))
        .masked_fill_(is_blocked, lowest(like.scalar_type()));
  }

  std::string name;
  bool is_decoder;
  double dropout_rate;
  std::shared_ptr<nn::RmsNorm> final_layer_norm;
  std::vector<std::shared_ptr<T5Block>> blocks;
};

/// dropout -> dense -> tanh -> dropout -> out_proj on one state a sentence.
struct T5ClassificationHead : torch::nn::Module {
  T5ClassificationHead(const T5Config& c, std::int64_t num_labels, const at::TensorOptions& options)
      : dropout_rate(c.classifier_dropout) {
    const auto add = [&](const char* part, std::int64_t in, std::int64_t out) {
      auto linear = register_module(part, std::make_shared<torch::nn::Module>());
      linear->register_parameter("weight", torch::empty({out, in}, options));
      linear->register_parameter("bias", torch::empty({out}, options));
      return linear;
    };
    dense = add("dense", c.d_model, c.d_model);
    out_proj = add("out_proj", c.d_model, num_labels);
  }

  Tensor forward(Tensor x_BD, ForwardContext& context) {
    const auto apply = [](torch::nn::Module& m, const Tensor& x) {
      return torch::linear(x, m.named_parameters(false)["weight"], m.named_parameters(false)["bias"]);
    };
    x_BD = torch::tanh(apply(*dense, nn::dropout(x_BD, dropout_rate, context)));
    return apply(*out_proj, nn::dropout(x_BD, dropout_rate, context));
  }

  double dropout_rate;
  std::shared_ptr<torch::nn::Module> dense, out_proj;
};

struct T5 : Backbone {
  T5(io::Json json, const T5Config& config_, const BuildOptions& options_)
      : source_config(std::move(json)),
        c(config_),
        options(options_),
        shared(register_module("shared", std::make_shared<nn::Linear>(c.d_model, c.vocab_size, options.tensors))),
        encoder(register_module("encoder", std::make_shared<T5Stack>(c, options.tensors, false))),
        decoder(register_module("decoder", std::make_shared<T5Stack>(c, options.tensors, true))) {
    if (options.head == Head::kClassification) {
      classification_head = register_module(
          "classification_head", std::make_shared<T5ClassificationHead>(c, options.num_labels, options.tensors));
    } else if (!c.tied) {
      lm_head = register_module("lm_head", std::make_shared<nn::Linear>(c.d_model, c.vocab_size, options.tensors));
    }
  }

  Tensor forward(const Inputs& in, ForwardContext& context) override {
    const auto encoded_BTD = encode(in.input_ids_BT, in.attention_mask_BT, context);
    if (classification_head) {
      // The decoder reads the sentence again; the state at its last </s> stands for it.
      context.mask_BT = in.attention_mask_BT;
      const auto decoded_BTD = decoder->forward(embed(shift_right(in.input_ids_BT)), {}, encoded_BTD,
                                                in.attention_mask_BT, nullptr, context);
      const auto is_eos_BT = in.input_ids_BT == c.eos_token_id;
      const auto position_BT = torch::arange(is_eos_BT.size(1), in.input_ids_BT.options()) * is_eos_BT;
      const auto last_B11 = std::get<0>(position_BT.max(1)).view({-1, 1, 1}).expand({-1, 1, c.d_model});
      return classification_head->forward(decoded_BTD.gather(1, last_B11).squeeze(1), context);
    }
    context.mask_BT = (in.labels_BU != -100).to(at::kLong);
    const auto decoder_input_BU = shift_right(in.labels_BU.masked_fill(in.labels_BU == -100, c.pad_token_id));
    return vocabulary_logits(
        decoder->forward(embed(decoder_input_BU), {}, encoded_BTD, in.attention_mask_BT, nullptr, context), context);
  }

  Tensor generate(const Tensor& input_ids_BT, const Tensor& attention_mask_BT, std::int64_t max_new_tokens,
                  std::optional<std::int64_t> eos, ForwardContext& context) override {
    TORCH_CHECK(!classification_head, "a classification head does not generate");
    const auto encoded_BTD = encode(input_ids_BT, attention_mask_BT, context);
    const auto batch = input_ids_BT.size(0);
    auto last_B1 = torch::full({batch, 1}, c.decoder_start_token_id, input_ids_BT.options());
    std::vector<Tensor> ids{last_B1};
    auto finished_B1 = torch::zeros({batch, 1}, input_ids_BT.options().dtype(at::kBool));
    DecodeState state;
    context.mask_BT = Tensor();
    for (std::int64_t step = 0; step < max_new_tokens; ++step) {
      const auto decoded = decoder->forward(embed(last_B1), {}, encoded_BTD, attention_mask_BT, &state, context);
      last_B1 = vocabulary_logits(decoded, context).argmax(-1);
      if (eos) {
        last_B1 = last_B1.masked_fill(finished_B1, c.pad_token_id);
        finished_B1 = finished_B1 | (last_B1 == *eos);
      }
      ids.push_back(last_B1);
      if (eos && finished_B1.all().item<bool>()) break;
    }
    return torch::cat(ids, 1);
  }

  std::vector<nn::FeedForwardSite> feed_forwards() override {
    std::vector<nn::FeedForwardSite> sites;
    for (const auto& stack : {encoder, decoder}) {
      for (std::size_t i = 0; i < stack->blocks.size(); ++i) {
        const auto& feed_forward = stack->blocks[i]->feed_forward->feed_forward;
        sites.push_back({feed_forward->place, feed_forward, stack->is_decoder && options.head == Head::kLanguageModel,
                         stack->name});
      }
    }
    return sites;
  }

  std::int64_t vocab_size() const override { return shared->weight.size(0); }

  void reorder_labels(std::span<const std::int64_t> order) override {
    const torch::NoGradGuard no_grad;
    const auto rows = torch::tensor(std::vector<std::int64_t>(order.begin(), order.end())).to(shared->weight.device());
    for (auto& item : classification_head->out_proj->named_parameters()) {
      item.value().copy_(item.value().index_select(0, rows));
    }
  }

  void initialize(at::Generator& generator, std::optional<std::span<const std::string>> only) override {
    const torch::NoGradGuard no_grad;
    const double d = static_cast<double>(c.d_model), kv = static_cast<double>(c.d_kv);
    const double n = static_cast<double>(c.num_heads), ff = static_cast<double>(c.d_ff);
    for (auto& item : named_parameters()) {
      const auto& name = item.key();
      const bool wanted = !only || std::ranges::find(*only, name) != only->end();
      if (!wanted) continue;
      auto& p = item.value();
      const auto ends = [&](std::string_view suffix) { return name.ends_with(suffix); };
      double std_dev = std::pow(d, -0.5);  // k, v, wi, wi_0, wi_1, relative_attention_bias, classification head
      if (ends("norm.weight")) {
        p.fill_(c.initializer_factor);
        continue;
      }
      if (ends(".bias")) {
        p.zero_();
        continue;
      }
      if (name == "shared.weight" || name == "lm_head.weight") {
        std_dev = 1.0;
      } else if (ends(".q.weight")) {
        std_dev = std::pow(d * kv, -0.5);
      } else if (ends(".o.weight")) {
        std_dev = std::pow(n * kv, -0.5);
      } else if (ends(".wo.weight")) {
        std_dev = std::pow(ff, -0.5);
      }
      std_dev *= c.initializer_factor;
      if (name == "shared.weight" && options.embedding_std) std_dev = *options.embedding_std;
      // Drawn on the CPU in float32, so that every device and dtype starts from the same weights.
      p.copy_(torch::empty(p.sizes(), at::kFloat).normal_(0.0, std_dev, generator));
    }
  }

  std::string file_name(const std::string& parameter) const override {
    // transformers' classifier wraps the whole model under this name.
    return classification_head && !is_head(parameter) ? "transformer." + parameter : parameter;
  }

  bool is_ignored(const std::string& name) const override {
    return name == "encoder.embed_tokens.weight" || name == "decoder.embed_tokens.weight" ||
           name == "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight" ||
           (name == "lm_head.weight" && !lm_head) || (name.starts_with("classification_head.") && !classification_head);
  }

  bool is_head(const std::string& parameter) const override { return parameter.starts_with("classification_head."); }

  io::Json config() const override {
    auto json = source_config;
    json["architectures"] = {classification_head ? "T5ForSequenceClassification" : "T5ForConditionalGeneration"};
    json["model_type"] = "t5";
    for (const char* key : {"torch_dtype", "dtype", "transformers_version", "problem_type", "id2label", "label2id"}) {
      json.erase(key);
    }
    json["torch_dtype"] = tensor::dtype_name(shared->weight.scalar_type());
    json["dropout_rate"] = c.dropout_rate;
    json["decoder_start_token_id"] = c.decoder_start_token_id;  // transformers 5 has no default of its own
    if (classification_head) {
      io::Json id2label = io::Json::object(), label2id = io::Json::object();
      for (std::int64_t i = 0; i < options.num_labels; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const auto label = at < options.label_names.size() ? options.label_names[at] : fmt::format("LABEL_{}", i);
        id2label[std::to_string(i)] = label;
        label2id[label] = i;
      }
      json["id2label"] = id2label;
      json["label2id"] = label2id;
      json["problem_type"] = options.num_labels == 1 ? "regression" : "single_label_classification";
    }
    return json;
  }

  io::Json source_config;
  T5Config c;
  BuildOptions options;
  std::shared_ptr<nn::Linear> shared;  // token embeddings [V, D]
  std::shared_ptr<T5Stack> encoder, decoder;
  std::shared_ptr<T5ClassificationHead> classification_head;
  std::shared_ptr<nn::Linear> lm_head;  // untied only; tied models multiply by `shared`

 private:
  Tensor embed(const Tensor& ids) const { return torch::embedding(shared->weight, ids); }

  Tensor encode(const Tensor& input_ids_BT, const Tensor& attention_mask_BT, ForwardContext& context) {
    context.mask_BT = attention_mask_BT;
    return encoder->forward(embed(input_ids_BT), attention_mask_BT, {}, {}, nullptr, context);
  }

  Tensor shift_right(const Tensor& ids_BT) const {
    auto shifted = torch::full_like(ids_BT, c.decoder_start_token_id);
    shifted.slice(1, 1).copy_(ids_BT.slice(1, 0, ids_BT.size(1) - 1));
    return shifted;
  }

  Tensor vocabulary_logits(const Tensor& decoded, ForwardContext& context) {
    if (lm_head) return lm_head->forward(decoded, context);
    return torch::linear(decoded * std::pow(static_cast<double>(c.d_model), -0.5), shared->weight);
  }
};

std::shared_ptr<Backbone> build_t5(const io::Json& config, const std::string& origin, const BuildOptions& options) {
  auto c = T5Config::read(config, origin);
  if (options.dropout) c.dropout_rate = *options.dropout;
  return std::make_shared<T5>(config, c, options);
}

}  // namespace

constinit const Family kT5{
    .name = "t5",
    .summary = "T5 v1.0 and v1.1 / flan: encoder-decoder with relative position bias",
    .paper = "Raffel et al. 2020, arXiv:1910.10683",
    .build = build_t5};

}  // namespace mergex::backbones
