#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/adapter_folder.h"
#include "io/checkpoint_folder.h"
#include "merging/source.h"

namespace mergex::merging {

/// What an adapter makes of a checkpoint, tensor by tensor, without a copy of any of them:
///
///     W' = W + scaling * B A                      stored [out, in]
///     W' = W + scaling * (B A)^T                  stored [in, out] (Conv1D of the GPT-2 family), and embeddings
///     W' = m * (W + delta W) / |W + delta W|      DoRA (Liu et al. 2024, arXiv:2402.09353): the norm of what leads to
///                                                 one output; where it is 0, the result is 0
///     b' = b + scaling * bias of B
///     whole tensors (trained biases, modules_to_save, saved or resized embeddings) in place of the base's
///
/// Which way a weight is stored follows, as in PEFT, from the kind of its module: from its shape, or where that is
/// square from the model's family, or else from `fan_in_fan_out`.
class AppliedAdapter {
 public:
  /// An adapter of an embedding that is the model's head as well acts on one of its two uses.
  enum class TiedWeights {
    kRefuse,
    kUntie,  ///< both tensors are written, one without the adapter; `tie_word_embeddings` has to become false
  };

  /// What happens to one tensor.
  struct Change {
    std::string tensor;                ///< its name in the result
    std::vector<std::int64_t> shape;   ///< of the result: rows differ from the base's where a vocabulary was resized
    io::DType dtype = io::DType::kF32; ///< as the base stores it; of the adapter where the base has none
    bool wide = false;                 ///< float64 in the base or in the adapter
    const io::TensorView* base = nullptr;      ///< nullptr: taken whole from the adapter
    const io::TensorView* replaced = nullptr;  ///< the adapter's tensor that takes the place of the base's
    const io::LoraModule* module = nullptr;    ///< nullptr: not by B A
    bool is_bias = false;                      ///< by the bias of B
    bool transposed = false;                   ///< stored [in, out]
    std::string description;                   ///< "LoRA, rank 8, scaling 2", "from the adapter", for plan and report
  };

  /// Pairs every tensor of the adapter with the base's; prefixes that models carry or not, by the class that saved them
  /// ("model.", "transformer.", ...), are bridged. Reads no values of the base.
  /// @throws UserError for modules that the base lacks (with the nearest name), shapes that do not fit (naming both), and
  ///         tied embeddings under kRefuse
  AppliedAdapter(std::shared_ptr<const io::AdapterFolder> adapter, std::shared_ptr<const io::CheckpointFolder> base,
                 TiedWeights tied = TiedWeights::kRefuse);

  const io::AdapterFolder& adapter() const { return *adapter_; }
  const io::CheckpointFolder& base() const { return *base_; }

  /// nullptr: the tensor is the base's, unchanged (or no tensor of the model).
  const Change* find(std::string_view tensor) const;
  /// All changes, by name. Those whose name the base lacks are tensors that the model has more than the base: a
  /// classification head, or the head that was tied.
  const std::map<std::string, Change, std::less<>>& changes() const { return changes_; }
  /// Whether the result has a head of its own where the base has not.
  bool unties() const { return unties_; }

  /// The values of a tensor of the model, changed or not. Valid as long as adapter and base.
  /// @throws std::logic_error for a name that the model lacks
  std::unique_ptr<Source> source(std::string_view tensor) const;

 private:
  void pair_modules();
  void pair_whole_tensors();
  void untie(TiedWeights tied);
  std::string base_name(const std::string& tensor) const;
  Change& change_of(const std::string& tensor);
  bool is_stored_transposed(const io::LoraModule& module, const io::TensorView& weight) const;

  std::shared_ptr<const io::AdapterFolder> adapter_;
  std::shared_ptr<const io::CheckpointFolder> base_;
  std::map<std::string, Change, std::less<>> changes_;
  bool unties_ = false;
};

}  // namespace mergex::merging
