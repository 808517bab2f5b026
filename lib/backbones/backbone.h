#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/checkpoint_folder.h"
#include "io/json.h"
#include "nn/feed_forward.h"

namespace mergex::backbones {

/// What stands on top of the stack.
enum class Head { kLanguageModel, kClassification };

/// B batch, T input tokens, U target tokens, C labels, V vocab_size
struct Inputs {
  Tensor input_ids_BT;       ///< int64
  Tensor attention_mask_BT;  ///< int64: 1 real token, 0 padding
  Tensor labels_BU;          ///< int64 target ids of a language model, -100 where nothing is scored
};

struct BuildOptions {
  Head head = Head::kClassification;
  std::int64_t num_labels = 2;
  std::vector<std::string> label_names;  ///< written to config.json; may be empty
  std::optional<double> dropout;         ///< instead of the config's
  std::optional<double> embedding_std;   ///< spread of random token embeddings instead of the architecture's own
  at::TensorOptions tensors;             ///< dtype and device of the parameters
};

/// A model with a head. Parameter names are those of Hugging Face's files, without a `transformer.` prefix.
struct Backbone : torch::nn::Module {
  /// Logits: [B, C] of a classification head (C = 1: the regression score), [B, U, V] of a language model.
  virtual Tensor forward(const Inputs& inputs, nn::ForwardContext& context) = 0;

  /// Greedy continuation with a key-value cache: [B, 1 + new tokens], starting with the decoder's start token; rows
  /// that met `eos` go on with the padding id.
  virtual Tensor generate(const Tensor& input_ids_BT, const Tensor& attention_mask_BT, std::int64_t max_new_tokens,
                          std::optional<std::int64_t> eos, nn::ForwardContext& context) = 0;

  virtual std::vector<nn::FeedForwardSite> feed_forwards() = 0;

  /// Rows of the token embedding: ids below this can be read.
  virtual std::int64_t vocab_size() const = 0;
  /// Puts output `order[i]` of the classification head in place i.
  virtual void reorder_labels(std::span<const std::int64_t> order) = 0;

  /// Random weights, drawn as Hugging Face's `transformers` draws them. With `only`, just these parameters (a head
  /// that a checkpoint lacks).
  virtual void initialize(at::Generator& generator, std::optional<std::span<const std::string>> only) = 0;

  /// Name of a parameter in the file that this model writes.
  virtual std::string file_name(const std::string& parameter) const = 0;
  /// Whether a name of a file that is no parameter of this model may be left unread (old buffers, tied copies).
  virtual bool is_ignored(const std::string& name) const = 0;
  /// Whether a checkpoint may lack this parameter (a new head).
  virtual bool is_head(const std::string& parameter) const = 0;

  /// config.json of this model, as transformers reads it.
  virtual io::Json config() const = 0;
};

/// A family of models: how config.json names it, and how to build it with unset weights.
struct Family {
  const char* name;
  const char* summary;
  const char* paper;
  /// @param config  content of config.json  @param origin  its path, for messages
  std::shared_ptr<Backbone> (*build)(const io::Json& config, const std::string& origin, const BuildOptions& options);
};

std::span<const Family* const> registry();

/// By the config's `model_type`. @throws UserError for a family that is not there
std::shared_ptr<Backbone> build(const io::Json& config, const std::string& origin, const BuildOptions& options);

struct LoadOptions {
  bool check_only = false;  ///< compare names and shapes, copy nothing (a dry run on the meta device)
  bool new_head = false;    ///< draw the head anew even if the folder has one
};

/// Copies a folder's weights into a model. Every missing, unexpected or mis-shaped tensor is listed at once in one
/// UserError; a head that is asked for and missing is drawn from `generator` and said in one line.
void load_weights(Backbone& model, const io::CheckpointFolder& folder, at::Generator& generator,
                  const LoadOptions& options);

}  // namespace mergex::backbones
