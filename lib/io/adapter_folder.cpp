#include "io/adapter_folder.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <regex>

#include "core/error.h"
#include "core/one_line.h"
#include "io/json_object.h"

namespace mergex::io {
namespace fs = std::filesystem;
namespace {

constexpr const char* kConfig = "adapter_config.json";
constexpr const char* kWeights = "adapter_model.safetensors";
constexpr const char* kOldWeights = "adapter_model.bin";
constexpr std::size_t kMaxPatternLength = 1000;

// Options whose effect is no change of weights, or not the one that B A says.
struct Refused {
  const char* key;
  const char* what;
};
constexpr Refused kRefused[] = {
    {"alora_invocation_tokens", "an activated LoRA acts on some tokens only and cannot become weights"},
    {"arrow_config", "arrow routing chooses between adapters per token and cannot become weights"},
    {"kasa_config", "KaSA adapters are not supported; merge it into its base with PEFT (merge_and_unload)"},
    {"monteclora_config", "MonteCLoRA adapters are not supported; merge it into its base with PEFT (merge_and_unload)"},
    {"use_bdlora", "block-diagonal LoRA is not supported; merge it into its base with PEFT (merge_and_unload)"},
    {"use_qalora", "QA-LoRA belongs to quantised weights and is not supported"},
    {"layer_replication", "the adapter belongs to a base with repeated layers and is not supported"},
    {"target_parameters", "adapters of parameters (experts) are not supported; merge it into its base with PEFT "
                          "(merge_and_unload)"},
    {"trainable_token_indices", "trainable tokens are not supported; merge it into its base with PEFT (merge_and_unload)"},
    {"enable_lora", "adapters of parts of a fused layer (PEFT before 0.3) are not supported; merge it into its base "
                    "with PEFT (merge_and_unload)"},
};

// Options without an effect on what the weights mean.
constexpr const char* kIgnored[] = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config",
    "megatron_core", "merge_weights", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules",
    "task_type", "velora_config"};

// Starts that leave the base's weights as they are. The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) move a part of W
// into B A, and the adapter then belongs to what is left of W.
constexpr const char* kHarmlessStarts[] = {"gaussian", "eva", "orthogonal", "mica"};

// Modules that PEFT saves whole when a vocabulary was resized or an embedding has an adapter.
constexpr const char* kEmbeddings[] = {"embed_tokens", "lm_head", "wte", "shared", "word_embeddings", "embed_in", "embed_out"};

bool is_empty(const Json& value) {
  return value.is_null() || value == false || ((value.is_object() || value.is_array()) && value.empty());
}

std::string_view last_part(std::string_view name) { return name.substr(name.rfind('.') + 1); }  // npos + 1 is 0

bool is_floating(DType dtype) {
  return dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF32 || dtype == DType::kF64;
}

fs::path checked(const fs::path& folder) {
  std::error_code ignored;
  const auto name = one_line(folder.string());
  if (!fs::exists(folder, ignored)) fail("{}: no such folder, expected an adapter ({} and {})", name, kConfig, kWeights);
  if (!fs::exists(folder / kConfig, ignored)) {
    fail("{}: holds no {}; copy it from where the adapter comes from", name, kConfig);
  }
  if (!fs::exists(folder / kWeights, ignored) && !fs::exists(folder / kOldWeights, ignored)) {
    fail("{}: holds neither {} nor {}; copy one from where the adapter comes from", name, kWeights, kOldWeights);
  }
  return folder;
}

}  // namespace

/// The numbers that a config gives to modules by their names: `rank_pattern`, `alpha_pattern`. As PEFT has it, a key is a
/// regular expression for the whole name or for its last parts, and the first that fits wins.
struct AdapterFolder::Ranks {
  class Patterns {
   public:
    void add(const std::string& key, double value, const std::string& where) {
      Entry entry{key, value, is_literal(key), {}};
      if (!entry.literal) {
        // What compiles to a large automaton is nobody's list of layers.
        if (key.size() > kMaxPatternLength || key.find('{') != std::string::npos) {
          fail("{}: pattern {} is longer than {} characters or counts repetitions; list the modules instead", where,
               shown(Json(key)), kMaxPatternLength);
        }
        auto syntax = std::regex::ECMAScript;
#ifdef _GLIBCXX_RELEASE
        syntax |= std::regex_constants::__polynomial;  // no pattern may take exponential time
#endif
        try {
          entry.expression = std::regex("(?:.*\\.)?(?:" + key + ")", syntax);
        } catch (const std::regex_error&) {
          fail("{}: cannot read the pattern {}; list the modules instead", where, shown(Json(key)));
        }
      }
      entries_.push_back(std::move(entry));
    }

    std::optional<double> find(const std::string& module) const {
      for (const auto& entry : entries_) {
        if (entry.literal ? is_tail(entry.key, module) : std::regex_match(module, entry.expression)) return entry.value;
      }
      return std::nullopt;
    }

   private:
    struct Entry {
      std::string key;
      double value;
      bool literal;
      std::regex expression;
    };

    // A name with dots, perhaps with ^ before it and the dots escaped: matched without an automaton.
    static bool is_literal(const std::string& key) {
      for (std::size_t i = 0; i < key.size(); ++i) {
        const auto c = static_cast<unsigned char>(key[i]);
        const bool escaped_dot = c == '\\' && i + 1 < key.size() && key[i + 1] == '.';
        if (!std::isalnum(c) && c != '_' && c != '.' && !escaped_dot && !(c == '^' && i == 0)) return false;
      }
      return true;
    }
    static bool is_tail(std::string_view key, std::string_view name) {
      const bool whole = key.starts_with('^');
      std::size_t k = key.size(), n = name.size();
      const std::size_t first = whole ? 1 : 0;
      while (k > first) {
        if (n == 0) return false;
        const bool escaped = key[k - 1] == '.' && k - 1 > first && key[k - 2] == '\\';
        if (key[k - 1] != name[n - 1] && (key[k - 1] != '.' || escaped)) return false;
        k -= escaped ? 2 : 1;
        --n;
      }
      return n == 0 || (!whole && name[n - 1] == '.');
    }

    std::vector<Entry> entries_;
  };

  double rank = 8, alpha = 8;
  bool use_rslora = false;
  Patterns ranks, alphas;

  double rank_of(const std::string& module) const { return ranks.find(module).value_or(rank); }
  double scaling_of(const std::string& module) const {
    const double r = rank_of(module);
    return alphas.find(module).value_or(alpha) / (use_rslora ? std::sqrt(r) : r);
  }
};

bool AdapterFolder::is_adapter(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / kConfig, ignored);
}

AdapterFolder::Weights AdapterFolder::open_weights(const fs::path& folder) {
  std::error_code ignored;
  if (fs::exists(folder / kWeights, ignored)) return SafetensorsFile::open(folder / kWeights);
  return TorchFile::open(folder / kOldWeights);
}

const std::vector<TensorView>& AdapterFolder::tensors() const {
  return std::visit([](const auto& file) -> const std::vector<TensorView>& { return file.tensors(); }, weights_);
}

const fs::path& AdapterFolder::weights_file() const {
  return std::visit([](const auto& file) -> const fs::path& { return file.path(); }, weights_);
}

AdapterFolder::AdapterFolder(fs::path folder)
    : path_(checked(folder)), config_(read_json(path_ / kConfig)), weights_(open_weights(path_)) {
  sort_tensors(read_config());
}

AdapterFolder::Ranks AdapterFolder::read_config() {
  const auto file = (path_ / kConfig).string();
  auto document = std::make_shared<JsonDocument>();
  document->file = file;
  document->value = config_;
  if (config_.is_object()) {  // versions of PEFT write null for what they do not use
    document->value = Json::object();
    for (const auto& [key, value] : config_.items()) {
      if (!value.is_null()) document->value[key] = value;
    }
  }

  JsonObject json(document);
  const auto type = json.required<std::string>("peft_type");
  if (type != "LORA") json.fail_value("peft_type", "expected \"LORA\"; merge it into its base with PEFT (merge_and_unload)");
  for (const auto& [key, what] : kRefused) {
    if (const auto value = json.any(key); value && !is_empty(*value)) json.fail_value(key, what);
  }

  Ranks ranks;
  auto rank = static_cast<std::int64_t>(ranks.rank);
  json.optional("r", rank, {.at_least = 1, .at_most = 1 << 20});
  ranks.rank = static_cast<double>(rank);
  json.optional("lora_alpha", ranks.alpha);
  json.optional("use_rslora", ranks.use_rslora);
  json.optional("use_dora", use_dora_);
  json.optional("lora_bias", lora_bias_);
  json.optional("fan_in_fan_out", fan_in_fan_out_);
  json.optional("ensure_weight_tying", ensure_weight_tying_);
  json.optional("modules_to_save", modules_to_save_);
  static const std::string kBias[] = {"none", "all", "lora_only"};
  bias_ = kBias[json.choice("bias", kBias, 0)];
  if (use_dora_ && lora_bias_) json.fail_value("lora_bias", "which DoRA (use_dora) has no rule for");

  if (const auto start = json.any("init_lora_weights"); start && !start->is_boolean()) {
    const auto harmless = [&](const char* name) { return *start == name; };
    if (std::ranges::none_of(kHarmlessStarts, harmless)) {
      json.fail_value("init_lora_weights", "a start that changes the base, so that the adapter belongs to other weights; "
                                           "save it with path_initial_model_for_weight_conversion (PEFT)");
    }
  }
  const auto read_patterns = [&](const char* key, bool are_ranks, Ranks::Patterns& patterns) {
    auto numbers = json.object_or_empty(key);
    for (const auto& [pattern, value] : json.peek(key).items()) {
      const bool valid = are_ranks ? value.is_number_integer() && value.get<double>() >= 1 : value.is_number();
      if (!valid) numbers.fail_value(pattern, are_ranks ? "expected a rank of at least 1" : "expected a number");
      patterns.add(pattern, value.get<double>(), numbers.where());
    }
  };
  read_patterns("rank_pattern", true, ranks.ranks);
  read_patterns("alpha_pattern", false, ranks.alphas);

  for (const char* key : kIgnored) json.any(key);
  for (const auto& [key, value] : document->value.items()) {  // a later PEFT's options do no harm while they are off
    if (is_empty(value)) json.any(key);
  }
  json.finish();
  return ranks;
}

// Whether the config says that this whole tensor is part of the adapter.
bool AdapterFolder::may_replace(const std::string& name, bool of_target) const {
  const auto dot = name.rfind('.');
  const auto module = name.substr(0, dot == std::string::npos ? 0 : dot);
  if (name.ends_with(".bias") && (bias_ == "all" || (bias_ == "lora_only" && of_target))) return true;
  if (std::ranges::find(kEmbeddings, last_part(module)) != std::end(kEmbeddings)) return true;
  // PEFT saves a module whose name ends in one of modules_to_save, with everything below it.
  for (auto end = name.find('.'); end != std::string::npos; end = name.find('.', end + 1)) {
    const auto parent = std::string_view(name).substr(0, end);
    if (std::ranges::any_of(modules_to_save_, [&](const auto& saved) { return parent.ends_with(saved); })) return true;
  }
  return false;
}

void AdapterFolder::sort_tensors(const Ranks& ranks) {
  const auto file = weights_file().string();
  constexpr std::string_view kPrefix = "base_model.model.", kWrapped = ".base_layer.", kSaved = ".modules_to_save.";
  struct Part {
    std::string_view suffix;
    const TensorView* LoraModule::*member;
    bool is_embedding;
  };
  static constexpr Part kParts[] = {{".lora_A.weight", &LoraModule::a, false},
                                    {".lora_B.weight", &LoraModule::b, false},
                                    {".lora_B.bias", &LoraModule::bias, false},
                                    {".lora_embedding_A", &LoraModule::a, true},
                                    {".lora_embedding_B", &LoraModule::b, true},
                                    {".lora_magnitude_vector", &LoraModule::magnitude, false},
                                    {".lora_magnitude_vector.weight", &LoraModule::magnitude, false}};
  std::map<std::string, LoraModule> modules;
  std::map<std::string, const TensorView*> whole;  // what is no part of a module
  std::map<std::string, bool> of_target;
  for (const auto& tensor : tensors()) {
    if (!is_floating(tensor.dtype)) {
      fail("{}: tensor {} is {}, expected F32, BF16, F16 or F64", file, shown(Json(tensor.name)), dtype_name(tensor.dtype));
    }
    auto name = tensor.name;
    if (name.starts_with(kPrefix)) name.erase(0, kPrefix.size());
    const auto* part = std::ranges::find_if(kParts, [&](const Part& p) { return name.ends_with(p.suffix); });
    if (part != std::end(kParts) && name.size() > part->suffix.size()) {
      name.resize(name.size() - part->suffix.size());
      auto& module = modules[name];
      module.name = name;
      module.is_embedding |= part->is_embedding;
      if (module.*part->member != nullptr) {
        fail("{}: tensors {} and {} are the same part of \"{}\"", file, shown(Json((module.*part->member)->name)),
             shown(Json(tensor.name)), one_line(name));
      }
      module.*part->member = &tensor;
      continue;
    }
    bool target = false;
    if (const auto at = name.rfind(kWrapped); at != std::string::npos) {
      name.replace(at, kWrapped.size(), ".");
      target = true;
    } else if (const auto saved = name.rfind(kSaved); saved != std::string::npos) {
      name.replace(saved, kSaved.size(), ".");
    }
    if (!whole.emplace(name, &tensor).second) {
      fail("{}: tensors {} and {} are both \"{}\"", file, shown(Json(whole[name]->name)), shown(Json(tensor.name)),
           one_line(name));
    }
    of_target[name] = target;
  }

  for (auto& [name, module] : modules) {
    if (module.a == nullptr || module.b == nullptr) {
      fail("{}: module \"{}\" has no lora_{}; save the adapter again", file, one_line(name), module.a == nullptr ? "A" : "B");
    }
    module.scaling = ranks.scaling_of(name);
    check_module(module, ranks);
    modules_.push_back(module);
  }
  for (const auto& [name, tensor] : whole) {
    const bool target = of_target[name] || modules.contains(name.substr(0, name.rfind('.')));
    if (!may_replace(name, target)) {
      fail("{}: tensor {} is no part of a LoRA adapter that {} describes (modules_to_save, bias); expected lora_A, lora_B, "
           "lora_embedding_A or lora_embedding_B; save the adapter again", file, shown(Json(tensor->name)), kConfig);
    }
  }
  replaced_ = std::move(whole);
  if (modules_.empty() && replaced_.empty()) fail("{}: holds no tensor; save the adapter again", file);
}

void AdapterFolder::check_module(const LoraModule& module, const Ranks& ranks) const {
  const auto file = weights_file().string();
  const auto name = one_line(module.name);
  for (const auto* factor : {module.a, module.b}) {
    if (factor->shape.size() != 2) {
      fail("{}: tensor {} is {}, expected a matrix; adapters of convolutions and of experts are not supported", file,
           shown(Json(factor->name)), shape_text(factor->shape));
    }
    if (factor->num_elements() == 0) {
      fail("{}: tensor {} is empty {}; gather its parts before saving (ZeRO-3, FSDP)", file, shown(Json(factor->name)),
           shape_text(factor->shape));
    }
  }
  if (module.a->shape[0] != module.b->shape[1]) {
    fail("{}: module \"{}\": A is {} and B is {}, expected [rank, in] and [out, rank]; save the adapter again", file, name,
         shape_text(module.a->shape), shape_text(module.b->shape));
  }
  const auto expected = ranks.rank_of(module.name);
  if (static_cast<double>(module.rank()) != expected) {
    fail("{}: module \"{}\" has rank {}, expected {} by r and rank_pattern of {}; take both files from the same adapter", file,
         name, module.rank(), expected, kConfig);
  }
  if ((module.magnitude != nullptr) != use_dora_) {
    fail("{}: module \"{}\" has {} lora_magnitude_vector, but use_dora of {} is {}; take both files from the same adapter",
         file, name, use_dora_ ? "no" : "a", kConfig, use_dora_);
  }
  if ((module.bias != nullptr) != (lora_bias_ && !module.is_embedding)) {
    fail("{}: module \"{}\" has {} lora_B.bias, but lora_bias of {} is {}; take both files from the same adapter", file, name,
         module.bias == nullptr ? "no" : "a", kConfig, lora_bias_);
  }
  for (const auto* vector : {module.magnitude, module.bias}) {
    if (vector != nullptr && vector->num_elements() != module.num_outputs()) {
      fail("{}: tensor {} is {}, expected {} values, one per output of \"{}\"", file, shown(Json(vector->name)),
           shape_text(vector->shape), module.num_outputs(), name);
    }
  }
}

std::vector<fs::path> AdapterFolder::files() const { return {path_ / kConfig, weights_file()}; }

}  // namespace mergex::io
