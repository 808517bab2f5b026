#include "io/checkpoint_folder.h"

#include <map>

#include "core/error.h"

namespace mergex::io {
namespace fs = std::filesystem;
namespace {

constexpr const char* kConfig = "config.json";
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// What other programs keep weights in, in the order in which it is worth naming them.
constexpr const char* kForeign[] = {"pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5",
                                    "flax_model.msgpack", "consolidated.00.pth"};

void check_folder(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::exists(folder, ignored)) {
    fail("{}: no such folder, expected a Hugging Face checkpoint ({} and {})", folder.string(), kConfig, kSingle);
  }
  if (!fs::is_directory(folder, ignored)) {
    fail("{}: is a file, expected the folder that holds {} and {}", folder.string(), kConfig, kSingle);
  }
  if (!fs::exists(folder / kConfig, ignored)) {
    fail("{}: holds no {}; copy it from where the weights come from", folder.string(), kConfig);
  }
}

[[noreturn]] void fail_without_weights(const fs::path& folder) {
  std::error_code ignored;
  for (const auto* name : kForeign) {
    if (fs::exists(folder / name, ignored)) {
      fail("{}: holds {} but no {}; convert it to safetensors first (save_pretrained does)", folder.string(), name,
           kSingle);
    }
  }
  fail("{}: holds neither {} nor {}; download the checkpoint again", folder.string(), kSingle, kIndex);
}

// The index is somebody else's file: a shard is a plain name in the same folder, never a way out of it.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
}

// Tensor name -> shard name.
std::map<std::string, std::string> read_index(const fs::path& file) {
  const auto index = read_json(file);
  const auto where = file.string();
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    fail("{}: holds no \"weight_map\" object; download it again", where);
  }
  std::map<std::string, std::string> shard_of;
  for (const auto& [tensor, shard] : index["weight_map"].items()) {
    if (!shard.is_string()) {
      fail("{}: tensor {}: got {}, expected the name of a file", where, shown(Json(tensor)), shown(shard));
    }
    if (!is_plain_name(shard.get_ref<const std::string&>())) {
      fail("{}: tensor {}: got {}, expected the name of a file in the same folder", where, shown(Json(tensor)),
           shown(shard));
    }
    shard_of.emplace(tensor, shard.get<std::string>());
  }
  if (shard_of.empty()) fail("{}: \"weight_map\" is empty; download it again", where);
  return shard_of;
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
  std::map<std::string, std::string> shard_of;
  const bool is_sharded = !fs::exists(path_ / kSingle, ignored);
  if (!is_sharded) {
    shards_.push_back(SafetensorsFile::open(path_ / kSingle));
  } else if (fs::exists(path_ / kIndex, ignored)) {
    descriptions_.push_back(path_ / kIndex);
    shard_of = read_index(path_ / kIndex);
    std::map<std::string, std::string> first_tensor_of;  // ordered: shards are opened by name
    for (const auto& [tensor, shard] : shard_of) first_tensor_of.emplace(shard, tensor);
    for (const auto& [shard, tensor] : first_tensor_of) {
      if (!fs::exists(path_ / shard, ignored)) {
        fail("{}: tensor {} lies in {}, which is not there; download it", (path_ / kIndex).string(),
             shown(Json(tensor)), shown(Json(shard)));
      }
      shards_.push_back(SafetensorsFile::open(path_ / shard));
    }
  } else {
    fail_without_weights(path_);
  }

  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const auto shard_name = shards_[i].path().filename().string();
    for (const auto& tensor : shards_[i].tensors()) {
      if (is_sharded) {
        const auto listed = shard_of.find(tensor.name);
        if (listed == shard_of.end() || listed->second != shard_name) {
          fail("{}: holds tensor {}, which {} {}; download both again", shards_[i].path().string(),
               shown(Json(tensor.name)), kIndex,
               listed == shard_of.end() ? "does not list" : fmt::format("places in \"{}\"", listed->second));
        }
      }
      index_.emplace(tensor.name, Location{i, &tensor});
    }
  }
  for (const auto& [tensor, shard] : shard_of) {
    if (!index_.contains(tensor)) {
      fail("{}: tensor {} is not in \"{}\", where it is listed; download both again", (path_ / kIndex).string(),
           shown(Json(tensor)), shard);
    }
  }
}

std::vector<const TensorView*> CheckpointFolder::tensors() const {
  std::vector<const TensorView*> all;
  all.reserve(index_.size());
  for (const auto& shard : shards_) {
    for (const auto& tensor : shard.tensors()) all.push_back(&tensor);
  }
  return all;
}

const TensorView* CheckpointFolder::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : found->second.tensor;
}

std::string CheckpointFolder::file_of(std::string_view tensor) const {
  const auto found = index_.find(tensor);
  return found == index_.end() ? path_.string() : shards_[found->second.shard].path().string();
}

std::vector<fs::path> CheckpointFolder::files() const {
  auto all = descriptions_;
  for (const auto& shard : shards_) all.push_back(shard.path());
  return all;
}

}  // namespace mergex::io
