#include "support/adapters.h"

#include <fmt/format.h>

#include "core/random.h"

namespace mergex::test {
namespace {

void write_tensors(const std::filesystem::path& file, const std::string& prefix, const NamedValues& tensors) {
  std::vector<io::TensorView> views;
  for (const auto& [name, tensor] : tensors) {
    views.push_back({prefix + name, io::DType::kF32, tensor.shape, std::as_bytes(std::span(tensor.values))});
  }
  io::write_safetensors(file, views);
}

}  // namespace

Values random_values(std::vector<std::int64_t> shape, std::uint64_t seed) {
  std::int64_t size = 1;
  for (const auto dimension : shape) size *= dimension;
  SplitMix64 random(seed);
  Values result{std::move(shape), {}};
  for (std::int64_t i = 0; i < size; ++i) {
    double sum = -6.0;
    for (int k = 0; k < 12; ++k) sum += random.uniform();
    result.values.push_back(static_cast<float>(sum));
  }
  return result;
}

void write_checkpoint(const std::filesystem::path& folder, const io::Json& config, const NamedValues& tensors) {
  std::filesystem::create_directories(folder);
  io::write_json(folder / "config.json", config);
  write_tensors(folder / "model.safetensors", "", tensors);
}

void write_adapter_folder(const std::filesystem::path& folder, const io::Json& config, const NamedValues& tensors) {
  std::filesystem::create_directories(folder);
  io::write_json(folder / "adapter_config.json", config);
  write_tensors(folder / "adapter_model.safetensors", "base_model.model.", tensors);
}

}  // namespace mergex::test
