#include "model_files.h"

#include <torch/torch.h>

#include <map>

#include "core/error.h"
#include "io/atomic_file.h"
#include "tensor/convert.h"

namespace mergex::engine {
namespace fs = std::filesystem;
using io::Json;
namespace {

using Tensors = std::vector<std::pair<std::string, Tensor>>;

/// The dense model's tensors, by the names in its file, and the experts', by parameter name.
struct Split {
  Tensors dense, experts;
};

Split split(const Model& model) {
  std::map<std::string, const routing::ExpertSet::Place*> places;
  for (const auto& place : model.experts.places()) places.emplace(place.name + ".", &place);
  const auto place_of = [&](const std::string& name) -> const routing::ExpertSet::Place* {
    auto at = places.upper_bound(name);
    if (at == places.begin()) return nullptr;
    --at;
    return name.starts_with(at->first) ? at->second : nullptr;
  };
  Split result;
  for (const auto& item : model.backbone->named_parameters()) {
    const auto* place = place_of(item.key());
    if (place == nullptr) {
      result.dense.emplace_back(model.backbone->file_name(item.key()), item.value());
    } else if (item.key() != place->name + ".weight") {
      result.experts.emplace_back(item.key(), item.value());
    }
  }
  for (const auto& place : model.experts.places()) {
    result.dense.emplace_back(model.backbone->file_name(place.name + ".weight"), place.layer->dense_weight());
  }
  return result;
}

void write_tensors(const fs::path& path, const Tensors& tensors) {
  std::vector<Tensor> on_cpu;
  std::vector<io::TensorView> views;
  for (const auto& [name, t] : tensors) {
    on_cpu.push_back(t.detach().to(at::kCPU).contiguous());
    views.push_back(tensor::view_of(name, on_cpu.back()));
  }
  io::write_safetensors(path, views);
}

void copy_into(const Tensor& target, const io::TensorView* view, const std::string& file, const std::string& name) {
  if (view == nullptr) fail("{}: \"{}\" is missing; the checkpoint is of another model", file, name);
  if (view->shape != target.sizes()) {
    fail("{}: \"{}\" is {}, expected {}", file, name, tensor::shape_text(view->shape),
         tensor::shape_text(target.sizes()));
  }
  const torch::NoGradGuard no_grad;
  Tensor(target).copy_(tensor::to_tensor(*view));
}

}  // namespace

void write_model(const Model& model, const fs::path& folder) {
  const torch::NoGradGuard no_grad;
  const auto tensors = split(model);
  write_tensors(folder / "model.safetensors", tensors.dense);
  io::write_json(folder / "config.json", model.backbone->config());
  io::write_file(folder / "spiece.model", io::read_file(model.tokenizer_file));
  if (model.experts.empty()) return;
  write_tensors(folder / "experts.safetensors", tensors.experts);
  io::Json names = io::Json::array();
  for (const auto& place : model.experts.places()) names.push_back(place.name);
  io::write_json(folder / "experts.json", {{"options", model.expert_options}, {"places", names}});
}

bool read_experts(Model& model, const fs::path& folder) {
  const auto path = folder / "experts.safetensors";
  if (!fs::exists(path)) return false;
  const auto description = io::read_json(folder / "experts.json");
  const auto theirs = description.value(Json::json_pointer("/options/method"), std::string());
  const auto ours = model.expert_options.at("method").get<std::string>();
  if (theirs != ours) {
    fail("{}: holds experts of method \"{}\", the recipe asks for \"{}\"; use the method that they were trained with",
         (folder / "experts.json").string(), theirs, ours);
  }
  const auto file = io::SafetensorsFile::open(path);
  for (const auto& [name, t] : split(model).experts) copy_into(t, file.find(name), path.string(), name);
  return true;
}

void read_model(Model& model, const fs::path& folder) {
  const auto path = folder / "model.safetensors";
  const auto file = io::SafetensorsFile::open(path);
  std::map<std::string, bool> has_base;
  for (const auto& item : model.backbone->named_parameters()) has_base.emplace(model.backbone->file_name(item.key()), true);
  for (const auto& [name, t] : split(model).dense) {
    // A place without a base expert has a dense stand-in in the file, and nothing to read it into.
    if (has_base.contains(name)) copy_into(t, file.find(name), path.string(), name);
  }
  if (!model.experts.empty() && !read_experts(model, folder)) {
    fail("{}: is missing; the checkpoint is of a dense model", (folder / "experts.safetensors").string());
  }
}

ModelCounts count_parameters(const Model& model) {
  ModelCounts counts;
  if (!model.experts.empty()) counts.experts = model.experts.count();
  std::int64_t total = 0;
  for (const auto& item : model.backbone->named_parameters()) {
    total += item.value().numel();
    if (model.backbone->is_head(item.key())) counts.head += item.value().numel();
  }
  counts.dense = total - counts.head - counts.experts.experts - counts.experts.routers - counts.experts.curvature;
  return counts;
}

}  // namespace mergex::engine
