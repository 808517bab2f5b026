#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "io/json.h"
#include "io/safetensors.h"
#include "merging/source.h"

namespace mergex::test {

/// A matrix or vector of float32 for small checkpoints and adapters.
struct Values {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};
using NamedValues = std::map<std::string, Values>;

/// Seeded numbers, roughly normal, the same on every machine.
Values random_values(std::vector<std::int64_t> shape, std::uint64_t seed);

/// config.json and model.safetensors.
void write_checkpoint(const std::filesystem::path& folder, const io::Json& config, const NamedValues& tensors);
/// adapter_config.json and adapter_model.safetensors; names get "base_model.model." before them.
void write_adapter_folder(const std::filesystem::path& folder, const io::Json& config, const NamedValues& tensors);

/// All values of a tensor with `size` elements.
template <class T>
std::vector<T> read_all(const merging::Source& source, std::int64_t size) {
  std::vector<T> values(static_cast<std::size_t>(size));
  source.read(0, size, values.data());
  return values;
}

}  // namespace mergex::test
