#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <set>

#include "backbones/t5.h"
#include "core/error.h"
#include "core/log.h"
#include "core/suggest.h"
#include "tensor/convert.h"

namespace mergex::backbones {
namespace {

constexpr std::array kFamilies{&kT5};

}  // namespace

std::span<const Family* const> registry() { return kFamilies; }

std::shared_ptr<Backbone> build(const io::Json& config, const std::string& origin, const BuildOptions& options) {
  const auto type = config.find("model_type");
  if (type == config.end() || !type->is_string()) {
    fail("{}: \"model_type\" is missing; expected a Hugging Face config.json", origin);
  }
  const auto name = type->get<std::string>();
  std::vector<std::string> names;
  for (const auto* family : kFamilies) {
    if (name == family->name) return family->build(config, origin, options);
    names.emplace_back(family->name);
  }
  fail("{}#/model_type: got \"{}\", expected {}{}", origin, name, quoted_list(names), did_you_mean(name, names));
}

void load_weights(Backbone& model, const io::CheckpointFolder& folder, at::Generator& generator,
                  const LoadOptions& options) {
  // Published files write the names of a bare model or behind "transformer.".
  const auto stripped = [](std::string name) {
    return name.starts_with("transformer.") ? name.substr(12) : name;
  };
  std::map<std::string, const io::TensorView*> in_file;
  std::vector<std::string> repeated;
  for (const auto* view : folder.tensors()) {
    const auto name = stripped(view->name);
    if (options.new_head && model.is_head(name)) continue;
    if (!in_file.emplace(name, view).second) repeated.push_back(name);
  }

  std::vector<std::string> problems, new_head, unused;
  for (const auto& name : repeated) {
    problems.push_back(fmt::format("\"{}\" stands there twice, with and without \"transformer.\"", name));
  }
  bool head_misfits = false;
  std::set<std::string> known;
  const auto parameters = model.named_parameters();
  for (const auto& item : parameters) {
    const auto& name = item.key();
    known.insert(name);
    const auto found = in_file.find(name);
    if (found == in_file.end()) {
      if (model.is_head(name)) {
        new_head.push_back(name);
      } else {
        problems.push_back(fmt::format("\"{}\" {} is missing", name, tensor::shape_text(item.value().sizes())));
      }
    } else if (found->second->shape != item.value().sizes()) {
      head_misfits = head_misfits || model.is_head(name);
      problems.push_back(fmt::format("\"{}\" is {}, expected {}", found->second->name,
                                     tensor::shape_text(found->second->shape),
                                     tensor::shape_text(item.value().sizes())));
    }
  }
  for (const auto& [name, view] : in_file) {
    if (known.contains(name)) continue;
    if (!model.is_ignored(name)) {
      problems.push_back(fmt::format("\"{}\" is not part of this model", view->name));
    } else {
      unused.push_back(name);
    }
  }
  if (!problems.empty()) {
    fail("{}: {} {} not fit the model: {}; use the weights that belong to this config{}", folder.path().string(),
         problems.size(), problems.size() == 1 ? "tensor does" : "tensors do", fmt::join(problems, "; "),
         head_misfits ? ", or start a new head with --set /model/new_head=true" : "");
  }
  if (!new_head.empty()) log::info("new head, drawn from the seed: {}", fmt::join(new_head, ", "));
  if (!unused.empty()) log::debug("not used from the checkpoint: {}", fmt::join(unused, ", "));
  if (options.check_only) return;

  const torch::NoGradGuard no_grad;
  for (const auto& item : parameters) {
    if (const auto found = in_file.find(item.key()); found != in_file.end()) {
      auto parameter = item.value();
      parameter.copy_(tensor::to_tensor(*found->second));
    }
  }
  if (!new_head.empty()) model.initialize(generator, std::span<const std::string>(new_head));
}

}  // namespace mergex::backbones
