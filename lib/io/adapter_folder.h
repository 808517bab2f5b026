#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "io/json.h"
#include "io/safetensors.h"
#include "io/torch_file.h"

namespace mergex::io {

/// What LoRA learned for one module: delta W = scaling * B A (Hu et al. 2021, arXiv:2106.09685). An embedding's delta is
/// the transpose of that: A is [rank, num_embeddings] and B is [embedding_dim, rank].
struct LoraModule {
  std::string name;                 ///< in the base: "model.layers.0.self_attn.q_proj"
  const TensorView* a = nullptr;    ///< [rank, in]
  const TensorView* b = nullptr;    ///< [out, rank]
  bool is_embedding = false;
  double scaling = 1.0;             ///< alpha / rank, with rsLoRA alpha / sqrt(rank)
  const TensorView* magnitude = nullptr;  ///< DoRA: the norm that each output gets, out values
  const TensorView* bias = nullptr;       ///< of B, out values: b' = b + scaling * bias

  std::int64_t rank() const { return a->shape[0]; }
  std::int64_t num_inputs() const { return a->shape[1]; }
  std::int64_t num_outputs() const { return b->shape[0]; }
};

/// A LoRA adapter as PEFT writes it: adapter_config.json beside adapter_model.safetensors, or where there is none
/// adapter_model.bin. What it holds is checked whole: tensors that no rule accounts for, ranks that contradict the config and kinds of adapters whose effect is not
/// a change of weights are errors.
class AdapterFolder {
 public:
  /// Whether a folder holds an adapter (and not a checkpoint).
  static bool is_adapter(const std::filesystem::path& folder);

  /// @throws UserError in one line: where, what was found, what was expected
  explicit AdapterFolder(std::filesystem::path folder);

  const std::filesystem::path& path() const { return path_; }
  const Json& config() const { return config_; }
  /// By name.
  const std::vector<LoraModule>& modules() const { return modules_; }
  /// Whole tensors that take the place of the base's, by the name that they have there: trained biases, modules_to_save,
  /// saved or resized embeddings.
  const std::map<std::string, const TensorView*>& replaced() const { return replaced_; }

  /// Weights that the config says are stored [in, out]. PEFT overrides it by the kind of module (merging/adapter_source.h).
  bool fan_in_fan_out() const { return fan_in_fan_out_; }
  bool use_dora() const { return use_dora_; }
  /// "none", "all" or "lora_only".
  const std::string& bias() const { return bias_; }
  const std::vector<std::string>& modules_to_save() const { return modules_to_save_; }
  /// Whether what was learned for a tied embedding was learned for the head too.
  bool ensures_weight_tying() const { return ensure_weight_tying_; }

  const std::filesystem::path& weights_file() const;
  /// Config and weights: what to hash to know that two adapters are the same.
  std::vector<std::filesystem::path> files() const;

 private:
  using Weights = std::variant<SafetensorsFile, TorchFile>;
  struct Ranks;
  static Weights open_weights(const std::filesystem::path& folder);
  const std::vector<TensorView>& tensors() const;
  Ranks read_config();
  void sort_tensors(const Ranks& ranks);
  void check_module(const LoraModule& module, const Ranks& ranks) const;
  bool may_replace(const std::string& name, bool of_target) const;

  std::filesystem::path path_;
  Json config_;
  Weights weights_;
  std::vector<LoraModule> modules_;
  std::map<std::string, const TensorView*> replaced_;
  bool fan_in_fan_out_ = false, use_dora_ = false, lora_bias_ = false, ensure_weight_tying_ = false;
  std::string bias_ = "none";
  std::vector<std::string> modules_to_save_;
};

}  // namespace mergex::io
