#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "io/json.h"
#include "io/safetensors.h"

namespace mergex::test {

/// A tensor of a made-up checkpoint: seeded normal values, the same for the same name and seed.
struct MadeTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  io::DType dtype = io::DType::kF32;
  std::uint64_t seed = 1;
  double scale = 1.0;
};

/// Names and shapes of a Llama-like model, 8 wide, untied, with `layers` layers and `vocabulary` rows.
std::vector<MadeTensor> llama_tensors(std::int64_t layers, std::int64_t vocabulary, std::uint64_t seed,
                                      io::DType dtype = io::DType::kF32);
io::Json llama_config(std::int64_t layers, std::int64_t vocabulary, bool tied = false);

/// Writes config.json and model.safetensors, or `shards` shards and their index.
void make_checkpoint(const std::filesystem::path& folder, const io::Json& config, const std::vector<MadeTensor>& tensors,
                     std::size_t shards = 1);

/// The values that a made tensor has, before rounding to its type.
std::vector<float> made_values(const MadeTensor& tensor);

/// A floating-point tensor's values, exactly.
std::vector<double> values_of(const io::TensorView& view);

/// All bytes below a folder, by relative path.
std::vector<std::pair<std::string, std::string>> folder_content(const std::filesystem::path& folder);

}  // namespace mergex::test
