#include "merging/names.h"

#include <algorithm>
#include <array>

namespace mergex::merging {
namespace {

constexpr std::array<std::string_view, 5> kStackWords{"layers", "layer", "h", "block", "blocks"};

// Prefixes by which classes, trainers and wrappers make one architecture's names differ.
constexpr std::array<std::string_view, 8> kPrefixes{"model.",  "transformer.", "roberta.",   "bert.",
                                                    "module.", "_orig_mod.",   "language_model.", "base_model.model."};

constexpr std::array<std::string_view, 23> kFamilies{
    "t5",      "mt5",     "gpt2",   "roberta", "xlm-roberta", "camembert", "bert",  "phi3", "phi",    "llama",   "mistral", "mixtral",
    "qwen2",   "qwen3",   "gemma",  "gemma2",  "gemma3_text", "distilbert", "electra", "phimoe", "qwen2_moe", "qwen3_moe", "gpt_neox"};

bool is_number(std::string_view part) {
  return !part.empty() && part.size() < 10 && std::ranges::all_of(part, [](char c) { return c >= '0' && c <= '9'; });
}

struct Part {
  std::size_t begin, end;
};

std::vector<Part> parts_of(std::string_view name) {
  std::vector<Part> parts;
  std::size_t begin = 0;
  while (true) {
    const auto dot = name.find('.', begin);
    parts.push_back({begin, dot == std::string_view::npos ? name.size() : dot});
    if (dot == std::string_view::npos) return parts;
    begin = dot + 1;
  }
}

}  // namespace

std::string LayerName::text() const {
  return stack + (stack.empty() ? "" : ".") + std::to_string(layer) + (rest.empty() ? "" : ".") + rest;
}

std::optional<LayerName> layer_of(std::string_view name) {
  const auto parts = parts_of(name);
  const auto text = [&](std::size_t i) { return name.substr(parts[i].begin, parts[i].end - parts[i].begin); };
  std::optional<std::size_t> found;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (!is_number(text(i))) continue;
    if (i > 0 && std::ranges::find(kStackWords, text(i - 1)) != kStackWords.end()) {
      found = i;
      break;
    }
    if (!found) found = i;
  }
  if (!found) return std::nullopt;
  const auto& [begin, end] = parts[*found];
  return LayerName{.stack = std::string(name.substr(0, begin == 0 ? 0 : begin - 1)),
                   .layer = std::stoll(std::string(text(*found))),
                   .rest = std::string(end == name.size() ? "" : name.substr(end + 1))};
}

bool is_known_family(std::string_view model_type) { return std::ranges::find(kFamilies, model_type) != kFamilies.end(); }

bool stands_before_layers(std::string_view name) {
  for (const auto& [begin, end] : parts_of(name)) {
    const auto part = name.substr(begin, end - begin);
    if (part.find("embed") != std::string_view::npos || part == "wte" || part == "wpe" || part == "shared") return true;
  }
  return false;
}

std::string module_of(std::string_view name) {
  for (const auto* module : {"encoder", "decoder"}) {
    if (has_parts(name, module)) return module;
  }
  return "shared";
}

bool natural_less(std::string_view a, std::string_view b) {
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  std::size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (digit(a[i]) && digit(b[j])) {
      auto i_end = i, j_end = j;
      while (i_end < a.size() && digit(a[i_end])) ++i_end;
      while (j_end < b.size() && digit(b[j_end])) ++j_end;
      auto x = a.substr(i, i_end - i), y = b.substr(j, j_end - j);
      while (x.size() > 1 && x[0] == '0') x.remove_prefix(1);
      while (y.size() > 1 && y[0] == '0') y.remove_prefix(1);
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
      i = i_end;
      j = j_end;
    } else {
      if (a[i] != b[j]) return a[i] < b[j];
      ++i;
      ++j;
    }
  }
  if (i < a.size() || j < b.size()) return i == a.size();
  return a < b;  // "layers.01" and "layers.1" are two names
}

std::string Prefix::apply(std::string_view name) const {
  if (!removed.empty() && name.starts_with(removed)) return added + std::string(name.substr(removed.size()));
  return removed.empty() ? added + std::string(name) : std::string(name);
}

Prefix common_prefix(std::span<const std::string_view> names, const std::unordered_set<std::string_view>& reference) {
  // A head lies outside the prefix in either spelling, so a name counts as found as it is, too.
  const auto hits = [&](const Prefix& prefix) {
    return std::ranges::count_if(names, [&](std::string_view name) { return reference.contains(prefix.apply(name)); });
  };
  Prefix best;
  auto most = hits(best);
  if (most * 2 > static_cast<std::ptrdiff_t>(std::min(names.size(), reference.size()))) return best;
  for (const auto prefix : kPrefixes) {
    for (const auto& candidate : {Prefix{std::string(prefix), ""}, Prefix{"", std::string(prefix)}}) {
      if (const auto count = hits(candidate); count > most) {
        most = count;
        best = candidate;
      }
    }
  }
  return best;
}

bool has_parts(std::string_view name, std::string_view parts) {
  for (auto at = name.find(parts); at != std::string_view::npos; at = name.find(parts, at + 1)) {
    const auto end = at + parts.size();
    if ((at == 0 || name[at - 1] == '.') && (end == name.size() || name[end] == '.')) return true;
  }
  return false;
}

bool is_buffer_name(std::string_view name, std::span<const std::int64_t> shape) {
  const auto ends = [&](std::string_view end) { return name == end || name.ends_with("." + std::string(end)); };
  // GPT-2's causal mask is called like a bias; its shape [1, 1, n, n] tells them apart.
  if (ends("attn.bias")) return shape.size() == 4;
  return ends("position_ids") || ends("token_type_ids") || ends("inv_freq") || ends("original_inv_freq") ||
         ends("attn.masked_bias") || ends("num_batches_tracked");
}

std::string layer_count_key(const io::Json& config, std::string_view stack) {
  const auto has = [&](const char* key) { return config.contains(key) && config[key].is_number_integer(); };
  if (has_parts(stack, "decoder") && has("num_decoder_layers")) return "num_decoder_layers";
  for (const auto* key : {"num_hidden_layers", "n_layer", "num_layers", "n_layers"}) {
    if (has(key)) return key;
  }
  return "";
}

bool ties_embeddings(const io::Json& config) {
  if (config.contains("tie_word_embeddings") && config["tie_word_embeddings"].is_boolean()) {
    return config["tie_word_embeddings"].get<bool>();
  }
  const auto type = config.contains("model_type") && config["model_type"].is_string()
                        ? config["model_type"].get<std::string>() : std::string();
  constexpr std::array<std::string_view, 12> kUntied{"llama", "mistral", "mixtral", "qwen2", "qwen3", "phi", "phi3",
                                                     "qwen2_moe", "qwen3_moe", "phimoe", "gpt_neox", "mt5"};
  return std::ranges::find(kUntied, type) == kUntied.end();
}

}  // namespace mergex::merging
