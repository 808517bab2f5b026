#include "support/checkpoints.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/random.h"
#include "io/atomic_file.h"

namespace mergex::test {
namespace fs = std::filesystem;
using io::DType;

namespace {

std::uint16_t to_bfloat16(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Normal numbers of float16 only, rounded to nearest even by scaling to whole units.
std::uint16_t to_float16(float value) {
  if (value == 0.0f) return 0;
  const int exponent = std::max(std::ilogb(value), -14);
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(std::abs(static_cast<double>(value)), 10 - exponent)));
  const int carry = units == 2048 ? 1 : 0;
  const int mantissa = carry == 1 ? 1024 : units;
  const int biased = mantissa < 1024 ? 0 : exponent + carry + 15;
  return static_cast<std::uint16_t>((std::signbit(value) ? 0x8000 : 0) | (biased << 10) | (mantissa & 1023));
}

double from_float16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

template <class To, class From, class Convert>
std::string packed(const std::vector<From>& values, Convert convert) {
  std::string bytes(values.size() * sizeof(To), '\0');
  for (std::size_t i = 0; i < values.size(); ++i) {
    const To stored = static_cast<To>(convert(values[i]));
    std::memcpy(bytes.data() + i * sizeof(To), &stored, sizeof(To));
  }
  return bytes;
}

std::string bytes_of(const MadeTensor& tensor) {
  const auto values = made_values(tensor);
  const auto same = [](float v) { return v; };
  switch (tensor.dtype) {
    case DType::kF32: return packed<float>(values, same);
    case DType::kF64: return packed<double>(values, same);
    case DType::kBF16: return packed<std::uint16_t>(values, to_bfloat16);
    case DType::kF16: return packed<std::uint16_t>(values, to_float16);
    case DType::kI64: return packed<std::int64_t>(values, [](float v) { return std::lround(v * 100.0f); });
    default: throw std::logic_error("no made tensors of this type");
  }
}

}  // namespace

std::vector<MadeTensor> llama_tensors(std::int64_t layers, std::int64_t vocabulary, std::uint64_t seed, DType dtype) {
  constexpr std::int64_t kWidth = 8, kInner = 12, kKeyValue = 4;
  std::vector<MadeTensor> tensors{{"model.embed_tokens.weight", {vocabulary, kWidth}, dtype, seed}};
  for (std::int64_t i = 0; i < layers; ++i) {
    const auto add = [&](const char* rest, std::vector<std::int64_t> shape) {
      tensors.push_back({"model.layers." + std::to_string(i) + "." + rest, std::move(shape), dtype, seed});
    };
    add("self_attn.q_proj.weight", {kWidth, kWidth});
    add("self_attn.k_proj.weight", {kKeyValue, kWidth});
    add("self_attn.v_proj.weight", {kKeyValue, kWidth});
    add("self_attn.o_proj.weight", {kWidth, kWidth});
    add("mlp.gate_proj.weight", {kInner, kWidth});
    add("mlp.up_proj.weight", {kInner, kWidth});
    add("mlp.down_proj.weight", {kWidth, kInner});
    add("input_layernorm.weight", {kWidth});
    add("post_attention_layernorm.weight", {kWidth});
  }
  tensors.push_back({"model.norm.weight", {kWidth}, dtype, seed});
  tensors.push_back({"lm_head.weight", {vocabulary, kWidth}, dtype, seed});
  return tensors;
}

io::Json llama_config(std::int64_t layers, std::int64_t vocabulary, bool tied) {
  return {{"architectures", {"LlamaForCausalLM"}}, {"model_type", "llama"}, {"hidden_size", 8}, {"num_hidden_layers", layers},
          {"vocab_size", vocabulary}, {"tie_word_embeddings", tied}, {"torch_dtype", "float32"}};
}

std::vector<float> made_values(const MadeTensor& tensor) {
  std::int64_t count = 1;
  for (const auto dimension : tensor.shape) count *= dimension;
  SplitMix64 random(stream_seed(tensor.seed, tensor.name));
  std::vector<float> values(static_cast<std::size_t>(count));
  for (auto& value : values) {
    // Sum of four uniform numbers: bell-shaped, and the same on every machine.
    value = static_cast<float>(tensor.scale * (random.uniform() + random.uniform() + random.uniform() + random.uniform() - 2.0));
  }
  return values;
}

void make_checkpoint(const fs::path& folder, const io::Json& config, const std::vector<MadeTensor>& tensors, std::size_t shards) {
  fs::create_directories(folder);
  io::write_json(folder / "config.json", config);
  std::vector<std::string> bytes;
  for (const auto& tensor : tensors) bytes.push_back(bytes_of(tensor));
  io::Json index{{"metadata", {{"total_size", 0}}}, {"weight_map", io::Json::object()}};
  for (std::size_t s = 0; s < shards; ++s) {
    const auto name = shards == 1 ? std::string("model.safetensors") : fmt::format("model-{:05}-of-{:05}.safetensors", s + 1, shards);
    std::vector<io::TensorView> views;
    for (std::size_t i = s; i < tensors.size(); i += shards) {
      views.push_back({.name = tensors[i].name, .dtype = tensors[i].dtype, .shape = tensors[i].shape,
                       .bytes = std::as_bytes(std::span(bytes[i]))});
      index["weight_map"][tensors[i].name] = name;
    }
    io::write_safetensors(folder / name, views);
  }
  if (shards > 1) io::write_json(folder / "model.safetensors.index.json", index);
}

std::vector<double> values_of(const io::TensorView& view) {
  std::vector<double> values(static_cast<std::size_t>(view.num_elements()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto* at = view.bytes.data() + i * io::dtype_size(view.dtype);
    const auto as = [&]<class T>(T value) {
      std::memcpy(&value, at, sizeof value);
      return value;
    };
    switch (view.dtype) {
      case DType::kF32: values[i] = static_cast<double>(as(float{})); break;
      case DType::kF64: values[i] = as(double{}); break;
      case DType::kI64: values[i] = static_cast<double>(as(std::int64_t{})); break;
      case DType::kF16: values[i] = from_float16(as(std::uint16_t{})); break;
      case DType::kBF16: {
        const auto bits = static_cast<std::uint32_t>(as(std::uint16_t{})) << 16;
        float value = 0.0f;
        std::memcpy(&value, &bits, sizeof value);
        values[i] = static_cast<double>(value);
        break;
      }
      default: throw std::logic_error("no values of this type");
    }
  }
  return values;
}

std::vector<std::pair<std::string, std::string>> folder_content(const fs::path& folder) {
  std::vector<std::pair<std::string, std::string>> content;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) content.emplace_back(fs::relative(entry.path(), folder).string(), io::read_file(entry.path()));
  }
  std::ranges::sort(content);
  return content;
}

}  // namespace mergex::test
