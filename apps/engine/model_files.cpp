#include "model_files.h"

#include <torch/torch.h>

#include <map>
#include <set>

#include "core/error.h"
#include "core/log.h"
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
    } else if (item.key() != place->name + ".weight" && item.key() != place->name + ".bias") {
      result.experts.emplace_back(item.key(), item.value());
    }
  }
  for (const auto& place : model.experts.places()) {
    result.dense.emplace_back(model.backbone->file_name(place.name + ".weight"), place.layer->dense_weight());
    if (const auto bias = place.layer->dense_bias(); bias.defined()) {
      result.dense.emplace_back(model.backbone->file_name(place.name + ".bias"), bias);
    }
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

bool read_experts(Model& model, const fs::path& folder, bool check_only) {
  const torch::NoGradGuard no_grad;
  const auto path = folder / "experts.safetensors";
  if (!fs::exists(path)) return false;
  const auto file = io::SafetensorsFile::open(path);
  std::vector<std::string> problems;
  std::set<std::string> known;
  const auto experts = split(model).experts;
  for (const auto& [name, t] : experts) {
    known.insert(name);
    const auto* view = file.find(name);
    if (view == nullptr) {
      problems.push_back(fmt::format("\"{}\" is missing", name));
    } else if (view->shape != t.sizes()) {
      problems.push_back(fmt::format("\"{}\" is {}, expected {}", name, tensor::shape_text(view->shape),
                                     tensor::shape_text(t.sizes())));
    }
  }
  for (const auto& view : file.tensors()) {
    if (!known.contains(view.name)) problems.push_back(fmt::format("\"{}\" has no place in this model", view.name));
  }
  const auto description = folder / "experts.json";
  const auto theirs = io::read_json(description).at("options");
  if (!problems.empty() || theirs.at("method") != model.expert_options.at("method")) {
    if (problems.empty()) problems.push_back("its experts are of method " + io::shown(theirs.at("method")));
    fail("{}: does not fit the recipe's experts: {}{}; set /experts as in {}", path.string(), problems[0],
         problems.size() > 1 ? fmt::format(" (and {} more)", problems.size() - 1) : "", description.string());
  }
  if (theirs != model.expert_options) {
    log::warn("{}: these experts were trained with other options than the recipe's", description.string());
  }
  if (!check_only) {
    for (const auto& [name, t] : experts) Tensor(t).copy_(tensor::to_tensor(*file.find(name)));
  }
  return true;
}

void read_model(Model& model, const fs::path& folder) {
  const torch::NoGradGuard no_grad;
  const auto path = folder / "model.safetensors";
  const auto file = io::SafetensorsFile::open(path);
  std::set<std::string> has_base;
  for (const auto& item : model.backbone->named_parameters()) has_base.insert(model.backbone->file_name(item.key()));
  for (const auto& [name, t] : split(model).dense) {
    // A place without a base expert has a dense stand-in in the file, and nothing to read it into.
    if (has_base.contains(name)) copy_into(t, file.find(name), path.string(), name);
  }
  if (!model.experts.empty() && !read_experts(model, folder, /*check_only=*/false)) {
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
