#include "io/checkpoint_folder.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <unordered_set>

#include "core/error.h"
#include "io/atomic_file.h"
#include "io/plain_json.h"

namespace mergex::io {
namespace fs = std::filesystem;
namespace {

constexpr const char* kConfig = "config.json";

struct Layout {
  const char *single, *index;
};
constexpr Layout kSafetensors{"model.safetensors", "model.safetensors.index.json"};
constexpr Layout kTorch{"pytorch_model.bin", "pytorch_model.bin.index.json"};

// What other programs keep weights in, in the order in which it is worth naming them.
constexpr const char* kForeign[] = {"tf_model.h5", "flax_model.msgpack", "consolidated.00.pth"};

/// A name under which models keep a tensor that they also have under another one.
struct Alias {
  std::string_view name;
  std::array<std::string_view, 3> tensors;  // the first that is stored
  bool if_tied;                             // only where the config does not deny that the head is the embedding
};

constexpr std::array kAliases{
    Alias{"encoder.embed_tokens.weight", {"shared.weight"}, false},
    Alias{"decoder.embed_tokens.weight", {"shared.weight"}, false},
    Alias{"model.encoder.embed_tokens.weight", {"model.shared.weight"}, false},
    Alias{"model.decoder.embed_tokens.weight", {"model.shared.weight"}, false},
    Alias{"lm_head.weight", {"shared.weight", "model.shared.weight", "model.embed_tokens.weight"}, true},
    Alias{"lm_head.weight", {"transformer.wte.weight", "wte.weight"}, true},
    Alias{"lm_head.decoder.weight", {"roberta.embeddings.word_embeddings.weight"}, true},
    Alias{"lm_head.decoder.bias", {"lm_head.bias"}, false},
    Alias{"cls.predictions.decoder.weight", {"bert.embeddings.word_embeddings.weight"}, true},
    Alias{"cls.predictions.decoder.bias", {"cls.predictions.bias"}, false}};

bool denies_tied_head(const Json& config) {
  const auto is_false = [&](const char* key) { return config.contains(key) && config[key] == false; };
  // T5 of transformers 5 always says tie_word_embeddings: true and keeps the truth in the other one.
  return is_false("tie_word_embeddings") || is_false("scale_decoder_outputs");
}

std::optional<std::string> first_with_extension(const fs::path& folder, std::string_view extension) {
  std::set<std::string> found;
  for (const auto& item : fs::directory_iterator(folder)) {
    if (item.path().extension() == extension) found.insert(item.path().filename().string());
  }
  return found.empty() ? std::nullopt : std::optional(*found.begin());
}

constexpr std::string_view kGgufRepair =
    "GGUF, a format for running models, mostly quantised; use the safetensors that it was made from";

void check_folder(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::exists(folder, ignored)) {
    fail("{}: no such folder, expected a Hugging Face checkpoint ({} and {})", folder.string(), kConfig,
         kSafetensors.single);
  }
  if (!fs::is_directory(folder, ignored)) {
    if (folder.extension() == ".gguf") fail("{}: is {}", folder.string(), kGgufRepair);
    fail("{}: is a file, expected the folder that holds {} and {}", folder.string(), kConfig, kSafetensors.single);
  }
  if (fs::exists(folder / kConfig, ignored)) return;
  if (fs::exists(folder / "adapter_config.json", ignored)) {
    fail("{}: holds an adapter (adapter_config.json), expected a checkpoint; name its base model (a merge also takes "
         "BASE+ADAPTER)", folder.string());
  }
  if (const auto gguf = first_with_extension(folder, ".gguf")) {
    fail("{}: holds {}: {}", folder.string(), *gguf, kGgufRepair);
  }
  fail("{}: holds no {}; copy it from where the weights come from", folder.string(), kConfig);
}

[[noreturn]] void fail_without_weights(const fs::path& folder) {
  std::error_code ignored;
  for (const auto* name : kForeign) {
    if (fs::exists(folder / name, ignored)) {
      fail("{}: holds {} but no {}; convert it to safetensors first (save_pretrained does)", folder.string(), name,
           kSafetensors.single);
    }
  }
  if (const auto gguf = first_with_extension(folder, ".gguf")) {
    fail("{}: holds {}: {}", folder.string(), *gguf, kGgufRepair);
  }
  fail("{}: holds neither {} nor {}; download the checkpoint again", folder.string(), kSafetensors.single,
       kSafetensors.index);
}

// The index is somebody else's file: a shard is a plain name in the same folder, never a way out of it.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
}

struct Listed {
  std::string tensor, shard;
};

/// An index as programs write it; nothing for all others, faulty ones among them.
std::optional<std::vector<Listed>> read_plain_index(std::string_view text) {
  PlainJsonReader reader(text);
  std::vector<Listed> entries;
  std::unordered_set<std::string_view> names, keys;
  const bool is_read = reader.members([&](std::string_view section) {
    if (!keys.insert(section).second) return false;
    return reader.members([&](std::string_view name) {
      if (section == "weight_map") {
        std::string_view shard;
        if (!names.insert(name).second || !reader.string(shard)) return false;
        entries.push_back({std::string(name), std::string(shard)});
        return true;
      }
      std::int64_t value = 0;  // "metadata": {"total_size": 72}
      return name == "total_size" && keys.insert(name).second && reader.size(value);
    });
  });
  if (!is_read || !reader.at_end() || !keys.contains("weight_map")) return std::nullopt;
  return entries;
}

std::vector<Listed> read_any_index(std::string_view text, const std::string& where) {
  const auto index = parse_json(text, where);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    fail("{}: holds no \"weight_map\" object; download it again", where);
  }
  std::vector<Listed> entries;
  for (const auto& [tensor, shard] : index["weight_map"].items()) {
    if (!shard.is_string()) {
      fail("{}: tensor {}: got {}, expected the name of a file", where, shown(Json(tensor)), shown(shard));
    }
    entries.push_back({tensor, shard.get<std::string>()});
  }
  return entries;
}

/// In the order of the file.
std::vector<Listed> read_index(const fs::path& file) {
  const auto where = file.string();
  const auto text = read_file(file);
  auto entries = read_plain_index(text);
  if (!entries) entries = read_any_index(text, where);
  for (const auto& [tensor, shard] : *entries) {
    if (!is_plain_name(shard)) {
      fail("{}: tensor {}: got {}, expected the name of a file in the same folder", where, shown(Json(tensor)),
           shown(Json(shard)));
    }
  }
  if (entries->empty()) fail("{}: \"weight_map\" is empty; download it again", where);
  return *std::move(entries);
}

}  // namespace

CheckpointFolder::CheckpointFolder(fs::path folder) : path_(std::move(folder)) {
  check_folder(path_);
  descriptions_.push_back(path_ / kConfig);
  config_ = read_json(path_ / kConfig);
  if (!config_.is_object()) {
    fail("{}: got {}, expected a JSON object", (path_ / kConfig).string(), shown(config_));
  }

  std::error_code ignored;
  const auto holds = [&](const char* name) { return fs::exists(path_ / name, ignored); };
  for (const auto& layout : {kSafetensors, kTorch}) {
    if (!holds(layout.single) && !holds(layout.index)) continue;
    open_weights(layout.single, layout.index);
    return;
  }
  fail_without_weights(path_);
}

void CheckpointFolder::open_weights(const std::string& single, const std::string& index_name) {
  std::error_code ignored;
  const auto index_path = path_ / index_name;
  std::vector<Listed> listed;  // empty without an index
  std::unordered_map<std::string_view, std::string_view> shard_of;
  std::map<std::string, std::string> first_tensor_of;  // of each shard; ordered: shards are opened by name
  if (fs::exists(index_path, ignored)) {
    descriptions_.push_back(index_path);
    listed = read_index(index_path);
    for (const auto& [tensor, shard] : listed) {
      shard_of.emplace(tensor, shard);
      first_tensor_of.try_emplace(shard, tensor);
    }
    if (fs::exists(path_ / single, ignored) && !(first_tensor_of.size() == 1 && first_tensor_of.contains(single))) {
      fail("{}: holds both {} and {}, which names other files; one is left from an older run: remove it",
           path_.string(), single, index_name);
    }
  } else {
    first_tensor_of.emplace(single, "");
  }
  const bool is_torch = fs::path(single).extension() == ".bin";
  for (const auto& [shard, tensor] : first_tensor_of) {
    if (!fs::exists(path_ / shard, ignored)) {
      fail("{}: tensor {} lies in {}, which is not there; download it", index_path.string(), shown(Json(tensor)),
           shown(Json(shard)));
    }
    shards_.push_back(is_torch ? WeightFile(TorchFile::open(path_ / shard))
                               : WeightFile(SafetensorsFile::open(path_ / shard)));
  }

  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const auto shard_name = path_of(shards_[i]).filename().string();
    index_.reserve(index_.size() + tensors_of(shards_[i]).size());
    for (const auto& tensor : tensors_of(shards_[i])) {
      if (!shard_of.empty()) {
        const auto found = shard_of.find(tensor.name);
        if (found == shard_of.end() || found->second != shard_name) {
          fail("{}: holds tensor {}, which {} {}; download both again", path_of(shards_[i]).string(),
               shown(Json(tensor.name)), index_name,
               found == shard_of.end() ? "does not list" : fmt::format("places in \"{}\"", found->second));
        }
      }
      index_.emplace(tensor.name, Location{i, &tensor});
    }
  }
  for (const auto& [tensor, shard] : listed) {
    if (index_.contains(tensor)) continue;
    const auto* original = original_of(tensor);
    if (original == nullptr) {
      fail("{}: tensor {} is not in \"{}\", where it is listed; download both again", index_path.string(),
           shown(Json(tensor)), shard);
    }
    aliases_.emplace(tensor, original->name);
  }
  if (is_torch) find_shared_storages();
}

const TensorView* CheckpointFolder::original_of(std::string_view name) const {
  for (const auto& alias : kAliases) {
    if (alias.name != name || (alias.if_tied && denies_tied_head(config_))) continue;
    for (const auto tensor : alias.tensors) {
      if (const auto* found = tensor.empty() ? nullptr : find(tensor)) return found;
    }
  }
  return nullptr;
}

void CheckpointFolder::find_shared_storages() {
  for (const auto& alias : kAliases) {
    const auto *tensor = find(alias.name), *original = original_of(alias.name);
    if (tensor == nullptr || original == nullptr) continue;
    if (tensor->bytes.data() == original->bytes.data() && tensor->dtype == original->dtype &&
        tensor->shape == original->shape) {
      aliases_.emplace(tensor->name, original->name);
      index_.erase(tensor->name);
    }
  }
}

const std::vector<TensorView>& CheckpointFolder::tensors_of(const WeightFile& file) {
  return std::visit([](const auto& opened) -> const auto& { return opened.tensors(); }, file);
}

const fs::path& CheckpointFolder::path_of(const WeightFile& file) {
  return std::visit([](const auto& opened) -> const auto& { return opened.path(); }, file);
}

std::vector<const TensorView*> CheckpointFolder::tensors() const {
  std::vector<const TensorView*> all;
  all.reserve(index_.size());
  for (const auto& shard : shards_) {
    for (const auto& tensor : tensors_of(shard)) {
      if (!aliases_.contains(tensor.name)) all.push_back(&tensor);
    }
  }
  return all;
}

const TensorView* CheckpointFolder::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : found->second.tensor;
}

std::string CheckpointFolder::file_of(std::string_view tensor) const {
  const auto found = index_.find(tensor);
  return found == index_.end() ? path_.string() : path_of(shards_[found->second.shard]).string();
}

std::uint64_t CheckpointFolder::offset_of(std::string_view tensor) const {
  const auto& location = index_.at(tensor);
  const auto file = std::visit([](const auto& opened) { return opened.bytes(); }, shards_[location.shard]);
  return static_cast<std::uint64_t>(location.tensor->bytes.data() - file.data());
}

std::vector<fs::path> CheckpointFolder::files() const {
  auto all = descriptions_;
  for (const auto& shard : shards_) all.push_back(path_of(shard));
  return all;
}

std::vector<std::string> CheckpointFolder::unused_files() const {
  std::set<std::string> unused;
  for (const auto& item : fs::directory_iterator(path_)) {
    const auto name = item.path().filename().string();
    // Other .bin files are no weights (optimizer.bin, training_args.bin); those of another format are copies.
    const bool is_weights = std::holds_alternative<TorchFile>(shards_.front())
                                ? name.starts_with("pytorch_model") && name.ends_with(".bin")
                                : name.ends_with(".safetensors");
    if (is_weights) unused.insert(name);
  }
  for (const auto& shard : shards_) unused.erase(path_of(shard).filename().string());
  return {unused.begin(), unused.end()};
}

void check_not_quantised(const CheckpointFolder& folder) {
  constexpr std::string_view kRepair = "merge the weights that it was made from (16 or 32 bit) and quantise the result";
  if (const auto found = folder.config().find("quantization_config");
      found != folder.config().end() && !found->is_null()) {
    const auto method =
        found->is_object() && found->contains("quant_method") ? shown((*found)["quant_method"]) : "some method";
    fail("{}: the weights are quantised by {} (quantization_config); {}", (folder.path() / kConfig).string(), method,
         kRepair);
  }
  constexpr std::array<std::string_view, 7> kEndings{".qweight", ".qzeros",        ".absmax",          ".quant_map",
                                                     ".SCB",     ".weight_packed", ".weight_scale_inv"};
  for (const auto* tensor : folder.tensors()) {
    const auto is_ending = [&](std::string_view ending) { return tensor->name.ends_with(ending); };
    if (std::ranges::any_of(kEndings, is_ending)) {
      fail("{}: tensor {} belongs to quantised weights; {}", folder.file_of(tensor->name), shown(Json(tensor->name)),
           kRepair);
    }
  }
}

}  // namespace mergex::io
