#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/adapter_folder.h"
#include "io/checkpoint_folder.h"
#include "merging/method.h"

namespace mergex::merging {

/// A checkpoint (with an adapter or without) that a merge reads.
struct Model {
  std::string name;  ///< as the recipe gives it
  std::shared_ptr<const io::CheckpointFolder> folder;
  std::shared_ptr<const io::AdapterFolder> adapter = {};  ///< applied to it, tensor by tensor
};

/// One tensor of the result.
struct PlannedTensor {
  std::string name;
  io::DType dtype = io::DType::kF32;  ///< as written
  std::vector<std::int64_t> shape = {};
  bool wide = false;  ///< arithmetic in float64, because an input is float64

  struct Origin {
    std::size_t model = 0;    ///< in MergePlan::models
    std::string tensor;       ///< its name there
    const Source* source = nullptr;
  };
  std::optional<Origin> base = {};
  std::vector<Origin> inputs = {};   ///< in the order of context.inputs
  const Method* method = nullptr;    ///< nullptr: the bytes of `copied` as they are
  std::optional<Origin> copied = {}; ///< its source is a stored tensor of the written type
  TensorContext context = {};
  std::string note = {};             ///< why it is not merged like the others, for the plan and the report

  std::uint64_t num_bytes() const;   ///< as written
};

/// Everything that a merge will do, settled before any tensor is read and any file is written.
struct MergePlan {
  std::vector<Model> models;
  std::vector<std::shared_ptr<const io::SafetensorsFile>> statistics;  ///< Fisher information, Gram matrices
  std::vector<std::unique_ptr<const Source>> sources;  ///< what the tensors' origins point to
  std::vector<PlannedTensor> tensors;                  ///< in the order in which they are written
  std::filesystem::path donor;                         ///< folder that config, tokenizer and other files come from
  /// Files of the result beside the weights: name -> content, where it is not a copy of the donor's.
  std::vector<std::pair<std::string, std::string>> written_files;
  std::vector<std::filesystem::path> copied_files;     ///< relative to `donor`
  io::Json resolved;                                   ///< the recipe with everything filled in
  std::vector<std::string> warnings;
};

}  // namespace mergex::merging
