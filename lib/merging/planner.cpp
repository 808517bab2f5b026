#include "merging/planner.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "core/error.h"
#include "core/suggest.h"
#include "io/atomic_file.h"
#include "merging/adapter_source.h"
#include "merging/chat_template.h"
#include "merging/names.h"
#include "merging/sidecar_files.h"

namespace mergex::merging {
namespace fs = std::filesystem;
using io::DType;
using io::Json;

namespace {

bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF64;
}

DType promoted(DType a, DType b) {
  if (a == b) return a;
  if (a == DType::kF64 || b == DType::kF64) return DType::kF64;
  return DType::kF32;  // float16 and bfloat16 have no smaller common type
}

constexpr std::array<std::string_view, 4> kHeads{"lm_head.weight", "lm_head.decoder.weight",
                                                 "cls.predictions.decoder.weight", "embed_out.weight"};

bool is_input_embedding(std::string_view name) {
  return has_parts(name, "embed_tokens.weight") || has_parts(name, "wte.weight") || name == "shared.weight" ||
         has_parts(name, "word_embeddings.weight") || has_parts(name, "embed_in.weight");
}

// A tensor of a model as the merge sees it: with the model's adapter applied, and with the rows of the result's vocabulary.
struct ModelTensor {
  std::string name;                      // in the model's files
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape = {};
  bool is_wide = false;                  // float64, or an adapter's float64
  const io::TensorView* view = nullptr;  // as stored; nullptr: the adapter alone has it
  bool is_adapted = false;
  bool has_vocabulary_rows = false;

  std::span<const std::byte> bytes() const { return view == nullptr || is_adapted ? std::span<const std::byte>() : view->bytes; }
};

// A model's tensors by the names that the donor has for them.
struct NamedModel {
  const io::CheckpointFolder* folder = nullptr;
  std::shared_ptr<const AppliedAdapter> adapter = {};
  std::unordered_map<std::string, const ModelTensor*> tensors = {};
  std::deque<ModelTensor> all = {};
  std::vector<std::string> names = {};              // in the order of the files
  std::map<std::string, std::int64_t> layers = {};  // stack -> number of layers
  ModelTensor* embedding = nullptr;
  bool is_tied = false;  // by its config

  const ModelTensor* find(const std::string& name) const {
    const auto found = tensors.find(name);
    return found == tensors.end() ? nullptr : found->second;
  }
};

class Planner {
 public:
  Planner(const MergeSection& section, std::uint64_t seed) : section_(section), method_(*section.method), seed_(seed) {}

  MergePlan plan() {
    open_models();
    settle_heads();
    join_vocabularies();
    for (const auto& module : section_.modules) {
      if (names_in(module, {donor()}).empty()) {
        fail("{}: {} has no tensors of \"{}\"; use \"models\" or \"slices\" without modules", section_.where,
             plan_.donor.string(), module.name);
      }
      if (module.has_slices) {
        plan_slices(module);
      } else {
        plan_whole_models(module);
      }
    }
    fail_with(missing_, "tensors that are not in every model",
              "set \"missing\" to \"available\" (merge those that have it) or \"base\", or leave the model out");
    fail_with(mismatched_, "tensors whose shapes differ",
              "models with other vocabularies need \"tokenizer_source\"; other shapes cannot be merged");
    if (plan_.tensors.empty()) fail("{}: nothing would be written", section_.where);
    std::ranges::sort(plan_.tensors, natural_less, &PlannedTensor::name);
    check_filters();
    compare_buffers();
    edit_config();
    plan_.resolved = section_.resolved;
    return std::move(plan_);
  }

 private:
  // --- models

  std::size_t donor() const { return section_.base.value_or(section_.modules.back().slices.front().sources.front().model); }

  void open_models() {
    for (const auto& reference : section_.models) {
      plan_.models.push_back({.name = reference.text, .folder = std::make_shared<io::CheckpointFolder>(reference.path)});
      io::check_not_quantised(*plan_.models.back().folder);
      warn_of_unread_weights(reference.path, *plan_.models.back().folder);
      if (reference.adapter) plan_.models.back().adapter = std::make_shared<io::AdapterFolder>(*reference.adapter);
    }
    plan_.donor = plan_.models[donor()].folder->path();
    named_.resize(plan_.models.size());
    std::unordered_set<std::string_view> reference;
    reference.reserve(plan_.models[donor()].folder->tensors().size());
    for (const auto* tensor : plan_.models[donor()].folder->tensors()) reference.insert(tensor->name);
    for (std::size_t m = 0; m < plan_.models.size(); ++m) name_tensors(m, reference);
    const auto type = text_of(plan_.models[donor()].folder->config(), "model_type");
    if (!is_known_family(type)) {
      std::string stacks;
      for (const auto& [stack, count] : named_[donor()].layers) stacks += fmt::format("{}{} of \"{}\"", stacks.empty() ? "" : ", ", count, stack);
      plan_.warnings.push_back(fmt::format("{}: model_type \"{}\" is not among the known families; layers are counted by "
                                           "the first number in the tensors' names: {}", plan_.donor.string(), type,
                                           stacks.empty() ? "none" : stacks));
    }
    for (std::size_t m = 0; m < plan_.models.size(); ++m) {
      const auto other = text_of(plan_.models[m].folder->config(), "model_type");
      if (other != type) {
        plan_.warnings.push_back(fmt::format("{}: model_type is \"{}\", that of {} \"{}\"", plan_.models[m].name, other,
                                             plan_.models[donor()].name, type));
      }
    }
  }

  void warn_of_unread_weights(const fs::path& path, const io::CheckpointFolder& folder) {
    auto unused = folder.unused_files();
    std::erase(unused, "training_state.safetensors");  // how far our own training came
    if (std::erase(unused, "experts.safetensors") > 0) {
      plan_.warnings.push_back(fmt::format("{}: was trained with experts; only its dense model is merged, in which the base "
                                           "expert stands in each layer", path.string()));
    }
    if (unused.empty()) return;
    plan_.warnings.push_back(fmt::format("{}: {} not read, perhaps left by an older run: {}", path.string(),
                                         unused.size() == 1 ? "a file of weights is" : "files of weights are", fmt::join(unused, ", ")));
  }

  void name_tensors(std::size_t m, const std::unordered_set<std::string_view>& reference) {
    auto& named = named_[m];
    named.folder = plan_.models[m].folder.get();
    for (const auto* view : named.folder->tensors()) {
      named.all.push_back({.name = view->name, .dtype = view->dtype, .shape = view->shape,
                           .is_wide = view->dtype == DType::kF64, .view = view});
    }
    if (plan_.models[m].adapter != nullptr) {
      named.adapter = std::make_shared<AppliedAdapter>(plan_.models[m].adapter, plan_.models[m].folder,
                                                       section_.untie ? AppliedAdapter::TiedWeights::kUntie
                                                                      : AppliedAdapter::TiedWeights::kRefuse);
      unties_ = unties_ || named.adapter->unties();
      for (const auto& [name, change] : named.adapter->changes()) {
        auto found = std::ranges::find(named.all, name, &ModelTensor::name);
        if (found == named.all.end()) found = named.all.insert(named.all.end(), ModelTensor{.name = name});
        found->dtype = change.dtype;
        found->shape = change.shape;
        found->is_wide = change.wide;
        found->is_adapted = true;
      }
    }
    std::vector<std::string_view> stored;
    for (const auto& tensor : named.all) stored.push_back(tensor.name);
    const auto prefix = m == donor() ? Prefix{} : common_prefix(stored, reference);
    named.tensors.reserve(named.all.size());
    for (auto& tensor : named.all) {
      // What has the donor's name already (a head outside the prefix) keeps it.
      auto name = reference.contains(tensor.name) ? tensor.name : prefix.apply(tensor.name);
      if (const auto layer = layer_of(name)) {
        auto& count = named.layers[layer->stack];
        count = std::max(count, layer->layer + 1);
      }
      if (!named.tensors.emplace(name, &tensor).second) {
        fail("{}: \"{}\" and another tensor would both be called \"{}\"; remove one", named.folder->path().string(),
             tensor.name, name);
      }
      if (is_input_embedding(name) && (named.embedding == nullptr || name == "shared.weight")) named.embedding = &tensor;
      named.names.push_back(std::move(name));
    }
    named.is_tied = ties_embeddings(named.folder->config());
  }

  // Where the recipe joins vocabularies: every vocabulary tensor has the rows of the result from here on.
  void join_vocabularies() {
    if (!section_.tokenizer) return;
    std::vector<VocabularyModel> models;
    for (std::size_t m = 0; m < named_.size(); ++m) {
      const auto* embedding = named_[m].embedding;
      models.push_back({.name = plan_.models[m].name, .folder = named_[m].folder->path()});
      if (embedding == nullptr || embedding->shape.size() != 2) continue;
      models.back().rows = embedding->shape[0];
      models.back().hidden_size = embedding->shape[1];
    }
    vocabulary_ = plan_vocabulary(models, section_.base, donor(), *section_.tokenizer);
    for (std::size_t m = 0; m < named_.size(); ++m) {
      if (vocabulary_->maps[m] == nullptr) continue;
      const auto rows = models[m].rows;
      for (auto& tensor : named_[m].all) {
        if (!is_vocabulary_tensor(tensor.name, tensor.shape, rows)) continue;
        tensor.shape[0] = vocabulary_->rows;
        tensor.has_vocabulary_rows = true;
      }
    }
    for (auto& warning : vocabulary_->warnings) plan_.warnings.push_back(std::move(warning));
  }

  static std::string text_of(const Json& config, const char* key) {
    return config.contains(key) && config[key].is_string() ? config[key].get<std::string>() : std::string();
  }

  // --- tied heads

  // A head that is the embedding is written only where some model has one of its own.
  void settle_heads() {
    for (const auto& candidate : kHeads) {
      const std::string head(candidate);
      bool any_stored = false, any_own = false;
      std::vector<std::size_t> tied;
      for (std::size_t m = 0; m < named_.size(); ++m) {
        const auto* stored = named_[m].find(head);
        any_stored = any_stored || stored != nullptr;
        if (stored == nullptr) {
          if (named_[m].is_tied && named_[m].embedding != nullptr) tied.push_back(m);
          continue;
        }
        if (!named_[m].is_tied || section_.untie) {
          any_own = true;
          continue;
        }
        const auto* embedding = named_[m].embedding;
        if (embedding == nullptr || embedding->dtype != stored->dtype || embedding->shape != stored->shape ||
            embedding->is_adapted || stored->is_adapted || !std::ranges::equal(embedding->bytes(), stored->bytes())) {
          fail("{}: its config ties the head to the embedding, but \"{}\" is stored and differs from \"{}\"; set \"untie\": "
               "true to keep it, or remove it", named_[m].folder->file_of(stored->name), stored->name,
               embedding == nullptr ? "no embedding" : embedding->name);
        }
        tied.push_back(m);
      }
      if (!any_stored) continue;
      if (any_own && !tied.empty()) {
        const auto type = text_of(named_[donor()].folder->config(), "model_type");
        if (type == "t5") {
          fail("{}: ties its head, {} has one of its own; T5 scales the output of a tied head, so the two cannot be merged",
               plan_.models[tied.front()].name, "another model");
        }
        for (const auto m : tied) named_[m].tensors[head] = named_[m].embedding;
        unties_ = true;
      } else if (!any_own) {
        for (auto& named : named_) {
          if (named.tensors.erase(head) > 0) std::erase(named.names, head);
        }
      } else if (section_.untie) {
        unties_ = true;
      }
    }
  }

  // --- tensors

  // A source's tensor for one output tensor; nullptr where it has none.
  struct Found {
    const SliceSource* source = nullptr;
    std::size_t model = 0;
    const ModelTensor* tensor = nullptr;
    std::string name = {};  // what filters of the source's parameters are held against: its own layer, not the result's
  };

  bool is_in(const Module& module, const std::string& name) const { return module.name.empty() || module_of(name) == module.name; }

  // The names of a module's tensors in these models, each once.
  std::vector<std::string> names_in(const Module& module, const std::vector<std::size_t>& models) const {
    std::unordered_set<std::string_view> seen;
    std::vector<std::string> names;
    if (!models.empty()) seen.reserve(named_[models.front()].names.size());
    for (const auto m : models) {
      for (const auto& name : named_[m].names) {
        if (is_in(module, name) && seen.insert(name).second) names.push_back(name);
      }
    }
    return names;
  }

  std::vector<std::size_t> models_of(const Slice& slice) const {
    std::vector<std::size_t> models;
    if (section_.has_base_role()) models.push_back(*section_.base);
    for (const auto& source : slice.sources) {
      if (std::ranges::find(models, source.model) == models.end()) models.push_back(source.model);
    }
    return models;
  }

  void plan_whole_models(const Module& module) {
    const auto& slice = module.slices.front();
    for (const auto& name : names_in(module, models_of(slice))) {
      const auto layer = layer_of(name);
      double position = 0.0;
      if (layer) {
        std::int64_t count = 1;
        for (const auto m : models_of(slice)) {
          const auto found = named_[m].layers.find(layer->stack);
          if (found != named_[m].layers.end()) count = std::max(count, found->second);
        }
        position = count > 1 ? static_cast<double>(layer->layer) / static_cast<double>(count - 1) : 1.0;
      }
      std::vector<Found> found;
      for (const auto& source : slice.sources) found.push_back({&source, source.model, named_[source.model].find(name), name});
      const auto* base = section_.has_base_role() ? named_[*section_.base].find(name) : nullptr;
      emit(name, found, base, module, slice, position, false);
    }
  }

  // The one stack of layers that slices are cut from.
  std::string stack_of(const Module& module, const SliceSource& source) const {
    std::set<std::string> stacks;
    for (const auto& name : named_[source.model].names) {
      if (!is_in(module, name)) continue;
      if (const auto layer = layer_of(name)) stacks.insert(layer->stack);
    }
    if (stacks.empty()) fail("{}: has no layers to slice{}", source.where, module.name.empty() ? "" : " in " + module.name);
    if (stacks.size() > 1) {
      fail("{}: has several stacks of layers ({}); use \"modules\" with encoder, decoder and shared", source.where,
           fmt::join(stacks, ", "));
    }
    return *stacks.begin();
  }

  void plan_slices(const Module& module) {
    const auto stack = stack_of(module, module.slices.front().sources.front());
    for (std::size_t s = 0; s < module.slices.size(); ++s) {
      for (const auto& source : module.slices[s].sources) {
        const auto found = named_[source.model].layers.find(stack);
        const auto count = found == named_[source.model].layers.end() ? 0 : found->second;
        if (source.layers->second > count) {
          fail("{}/layer_range: got [{}, {}], but {} has {} layers (0..{})", source.where, source.layers->first,
               source.layers->second, plan_.models[source.model].name, count, count - 1);
        }
        if (source.layers->first == source.layers->second && s + 1 < module.slices.size()) {
          plan_.warnings.push_back(fmt::format("{}/layer_range: no layer at all; only a last slice is used for its head",
                                               source.where));
        }
      }
    }
    plan_outside(module, module.slices.front(), true);
    std::int64_t out_layer = 0;
    for (const auto& slice : module.slices) {
      const auto [first, end] = *slice.sources.front().layers;
      for (std::int64_t i = 0; i < end - first; ++i) plan_layer(module, slice, stack, i, end - first, out_layer++);
    }
    plan_outside(module, module.slices.back(), false);
    if (out_layer == 0) fail("{}: the slices hold no layer at all", module.slices.front().where);
    num_layers_[stack] = out_layer;
    for (const auto& slice : module.slices) {
      for (auto i = slice.sources.front().layers->first; i < slice.sources.front().layers->second; ++i) origins_[stack].push_back(i);
    }
  }

  // What stands before (or behind) the layers.
  void plan_outside(const Module& module, const Slice& slice, bool before) {
    for (const auto& name : names_in(module, models_of(slice))) {
      if (layer_of(name) || stands_before_layers(name) != before) continue;
      std::vector<Found> found;
      for (const auto& source : slice.sources) found.push_back({&source, source.model, named_[source.model].find(name), name});
      emit(name, found, section_.has_base_role() ? named_[*section_.base].find(name) : nullptr, module, slice, 0.0, false);
    }
  }

  void plan_layer(const Module& module, const Slice& slice, const std::string& stack, std::int64_t i, std::int64_t length,
                  std::int64_t out_layer) {
    const double position = length > 1 ? static_cast<double>(i) / static_cast<double>(length - 1) : 1.0;
    auto base_first = slice.sources.front().layers->first;
    for (const auto& source : slice.sources) {
      if (source.model == section_.base) base_first = source.layers->first;
    }
    std::vector<std::pair<std::size_t, std::int64_t>> layers;  // model, layer
    if (section_.has_base_role()) layers.emplace_back(*section_.base, base_first + i);
    for (const auto& source : slice.sources) layers.emplace_back(source.model, source.layers->first + i);
    std::vector<std::string> rests;
    std::set<std::string> seen;
    for (const auto& [model, layer] : layers) {
      for (const auto& rest : rests_of(model, stack, layer)) {
        if (seen.insert(rest).second) rests.push_back(rest);
      }
    }
    for (const auto& rest : rests) {
      const auto at = [&](std::size_t model, std::int64_t layer) {
        return named_[model].find(LayerName{stack, layer, rest}.text());
      };
      std::vector<Found> found;
      bool is_in_some_layers = false;
      for (const auto& source : slice.sources) {
        found.push_back({&source, source.model, at(source.model, source.layers->first + i),
                         LayerName{stack, source.layers->first + i, rest}.text()});
        if (found.back().tensor == nullptr) is_in_some_layers = is_in_some_layers || is_partial(source.model, stack, rest);
      }
      const auto* base = section_.has_base_role() ? at(*section_.base, base_first + i) : nullptr;
      emit(LayerName{stack, out_layer, rest}.text(), found, base, module, slice, position, is_in_some_layers);
    }
  }

  const std::vector<std::string>& rests_of(std::size_t model, const std::string& stack, std::int64_t layer) {
    auto& by_layer = rests_[{model, stack}];
    if (by_layer.empty()) {
      for (const auto& name : named_[model].names) {
        if (const auto parsed = layer_of(name); parsed && parsed->stack == stack) by_layer[parsed->layer].push_back(parsed->rest);
      }
    }
    return by_layer[layer];
  }

  // A tensor that this model has in some of its layers only (T5's relative positions): its absence elsewhere is right.
  bool is_partial(std::size_t model, const std::string& stack, const std::string& rest) {
    rests_of(model, stack, 0);
    for (const auto& [layer, names] : rests_[{model, stack}]) {
      if (std::ranges::find(names, rest) != names.end()) return true;
    }
    return false;
  }

  // --- one tensor

  void emit(const std::string& name, const std::vector<Found>& given, const ModelTensor* base, const Module& module,
            const Slice& slice, double position, bool may_be_missing) {
    std::vector<Found> found = given;
    bool drops_base = section_.has_base_role();
    std::erase_if(found, [&](const Found& f) {  // the base where it is listed; a second time it is an input
      if (!drops_base || f.model != section_.base) return false;
      drops_base = false;
      return true;
    });
    PlannedTensor tensor{.name = name};
    const ModelTensor* any = base;
    for (const auto& f : found) any = any == nullptr ? f.tensor : any;
    if (any == nullptr) return;
    tensor.shape = any->shape;

    if (!is_float(any->dtype) || is_buffer_name(name, any->shape)) {
      copy_buffer(std::move(tensor), found, base);
      return;
    }
    if (!settle_missing(tensor, found, base, may_be_missing)) return;
    for (const auto& f : found) {
      if (f.tensor->shape == any->shape) continue;
      mismatched_.push_back(fmt::format("\"{}\" is {} in {} and {} in {}", name, io::shape_text(f.tensor->shape),
                                        plan_.models[f.model].name, io::shape_text(any->shape),
                                        base != nullptr ? plan_.models[*section_.base].name : plan_.models[given.front().model].name));
      return;
    }

    const bool has_base = section_.has_base_role();
    auto stored = has_base ? base->dtype : found.front().tensor->dtype;
    bool is_wide = has_base && base->is_wide;
    for (const auto& f : found) {
      if (!has_base) stored = promoted(stored, f.tensor->dtype);
      is_wide = is_wide || f.tensor->is_wide;
      if (!is_float(f.tensor->dtype)) {
        fail("{}: \"{}\" is {}, elsewhere {}; expected a floating-point type", plan_.models[f.model].name, name,
             io::dtype_name(f.tensor->dtype), io::dtype_name(any->dtype));
      }
    }
    tensor.dtype = section_.out_dtype.value_or(section_.dtype.value_or(stored));
    tensor.wide = section_.dtype ? *section_.dtype == DType::kF64 : is_wide;

    auto& context = tensor.context;
    context = {.name = name, .shape = tensor.shape, .has_base = has_base, .dialect = section_.dialect, .seed = seed_};
    const bool is_16_bit = stored == DType::kBF16 || stored == DType::kF16;
    const bool is_uniform = std::ranges::all_of(found, [&](const Found& f) { return f.tensor->dtype == stored; });
    if (!section_.dtype && is_16_bit && is_uniform) context.native = stored;
    for (const auto& parameter : method_.parameters) {
      if (parameter.scope != Parameter::Scope::kShared) continue;
      context.shared.set(parameter.name, resolve(parameter, {&slice.parameters, &module.parameters, &section_.parameters},
                                                 name, position, section_.where));
    }
    for (std::size_t i = 0; i < found.size(); ++i) {
      const auto& f = found[i];
      const auto index = static_cast<std::size_t>(f.source - slice.sources.data());
      TensorContext::Input input{.identity = std::to_string(index)};
      for (const auto& parameter : method_.parameters) {
        if (parameter.scope != Parameter::Scope::kInput) continue;
        input.parameters.set(parameter.name,
                             resolve(parameter, {&f.source->parameters, &slice.parameters, &module.parameters, &section_.parameters},
                                     f.name, position, f.source->where));
      }
      if (f.name != name) source_names_.insert(f.name);
      input.statistics = statistics_of(*f.source, f.tensor->name, tensor.shape);
      context.inputs.push_back(std::move(input));
      tensor.inputs.push_back(origin(f.model, f.tensor, name));
    }
    if (has_base) tensor.base = origin(*section_.base, base, name);
    if (method_.problem != nullptr) {
      if (const auto problem = method_.problem(context); !problem.empty()) fail("{}: {}: {}", section_.where, name, problem);
    }
    tensor.method = &method_;
    copy_where_exact(tensor);
    plan_.tensors.push_back(std::move(tensor));
  }

  // What is known to be one input's values is copied as bytes.
  void copy_where_exact(PlannedTensor& tensor) const {
    if (method_.copies == nullptr) return;
    const auto index = method_.copies(tensor.context);
    if (!index) return;
    const auto& from = *index < 0 ? *tensor.base : tensor.inputs[static_cast<std::size_t>(*index)];
    const auto* stored = from.source->stored();
    if (stored == nullptr || stored->dtype != tensor.dtype) return;
    tensor.copied = from;
    tensor.method = nullptr;
  }

  // Applies the rule for tensors that only some models have. @return whether there is still something to merge
  bool settle_missing(PlannedTensor& tensor, std::vector<Found>& found, const ModelTensor* base, bool may_be_missing) {
    const bool has_base = section_.has_base_role();
    std::string lacking;
    for (const auto& f : found) {
      if (f.tensor == nullptr) lacking += (lacking.empty() ? "" : ", ") + plan_.models[f.model].name;
    }
    if (has_base && base == nullptr) lacking += (lacking.empty() ? "" : ", ") + plan_.models[*section_.base].name + " (the base)";
    if (lacking.empty()) return true;
    if (section_.missing == MissingRule::kError && !may_be_missing) {
      missing_.push_back(fmt::format("\"{}\" is not in {}{}", tensor.name, lacking, near_match(tensor.name, found)));
      return false;
    }
    const auto present = std::ranges::count_if(found, [](const Found& f) { return f.tensor != nullptr; });
    if (section_.missing == MissingRule::kBase || (has_base && present == 0)) {
      if (base == nullptr && !has_base && found.front().tensor != nullptr) base = found.front().tensor;
      if (base == nullptr) {
        plan_.warnings.push_back(fmt::format("\"{}\" is left out: it is not in {}", tensor.name, lacking));
        return false;
      }
      copy(std::move(tensor), section_.base.value_or(found.front().model), base, "copied: not in " + lacking);
      return false;
    }
    if (has_base && base == nullptr) {
      if (present == 1) {
        const auto only = std::ranges::find_if(found, [](const Found& f) { return f.tensor != nullptr; });
        copy(std::move(tensor), only->model, only->tensor, "copied: not in " + lacking);
      } else {
        missing_.push_back(fmt::format("\"{}\" is not in the base, so it has no task vectors", tensor.name));
      }
      return false;
    }
    std::erase_if(found, [](const Found& f) { return f.tensor == nullptr; });
    tensor.note = "not in " + lacking;
    return true;
  }

  std::string near_match(const std::string& name, const std::vector<Found>& found) const {
    for (const auto& f : found) {
      if (f.tensor != nullptr) continue;
      return did_you_mean(name, std::span(named_[f.model].names).first(std::min<std::size_t>(named_[f.model].names.size(), 2000)));
    }
    return "";
  }

  void copy(PlannedTensor tensor, std::size_t model, const ModelTensor* view, std::string note) {
    tensor.shape = view->shape;
    const bool converts = is_float(view->dtype) && !is_buffer_name(tensor.name, view->shape);
    tensor.dtype = converts ? section_.out_dtype.value_or(section_.dtype.value_or(view->dtype)) : view->dtype;
    tensor.note = std::move(note);
    const auto from = origin(model, view, tensor.name);
    tensor.context = {.name = tensor.name, .shape = tensor.shape};
    if (const auto* stored = from.source->stored(); stored != nullptr && stored->dtype == tensor.dtype) {
      tensor.copied = from;
    } else {  // its type changes, or an adapter or a vocabulary does it
      static const Method& passthrough = find_method("passthrough", section_.where);
      tensor.method = &passthrough;
      tensor.inputs.push_back(from);
      TensorContext::Input input{.identity = "0"};
      for (const auto& parameter : passthrough.parameters) input.parameters.set(parameter.name, parameter.fallback.value_or(1.0));
      tensor.context.inputs.push_back(std::move(input));
    }
    plan_.tensors.push_back(std::move(tensor));
  }

  void copy_buffer(PlannedTensor tensor, const std::vector<Found>& found, const ModelTensor* base) {
    std::size_t model = base != nullptr ? *section_.base : 0;
    const ModelTensor* first = base;
    std::vector<std::pair<std::size_t, const ModelTensor*>> others;
    for (const auto& f : found) {
      if (f.tensor == nullptr) continue;
      if (first == nullptr) {
        first = f.tensor;
        model = f.model;
      } else {
        others.emplace_back(f.model, f.tensor);
      }
    }
    for (const auto& [other, view] : others) buffers_.push_back({tensor.name, model, first, other, view});
    copy(std::move(tensor), model, first, "a buffer, copied");
  }

  // Buffers are never averaged: all inputs must have the same, unless the recipe says whose counts.
  void compare_buffers() const {
    if (section_.buffers_from_base) return;
    for (const auto& [name, model, view, other, other_view] : buffers_) {
      if (view->dtype == other_view->dtype && view->shape == other_view->shape && std::ranges::equal(view->bytes(), other_view->bytes())) continue;
      fail("{}: the buffer \"{}\" differs from that of {}; set \"buffers\" to \"base\" to take the latter",
           plan_.models[other].name, name, plan_.models[model].name);
    }
  }

  // @param name  in the result: the tensor that other models have in its place
  PlannedTensor::Origin origin(std::size_t model, const ModelTensor* tensor, const std::string& name) {
    if (!tensor->has_vocabulary_rows) return {.model = model, .tensor = tensor->name, .source = whole(model, tensor)};
    std::vector<RowSource::Part> parts;
    for (std::size_t m = 0; m < named_.size(); ++m) {
      const auto* same = m == model ? tensor : named_[m].find(name);
      parts.push_back(same == nullptr || !same->has_vocabulary_rows
                          ? RowSource::Part{}
                          : RowSource::Part{.source = whole(m, same), .rows = named_[m].embedding->view->shape[0]});
    }
    std::int64_t row_length = 1;
    for (std::size_t i = 1; i < tensor->shape.size(); ++i) row_length *= tensor->shape[i];
    try {
      plan_.sources.push_back(std::make_unique<RowSource>(vocabulary_->maps[model], std::move(parts), row_length));
    } catch (const std::invalid_argument& error) {
      fail("{}: \"{}\": {}; the models' vocabulary tensors do not fit together", section_.where, name, error.what());
    }
    return {.model = model, .tensor = tensor->name, .source = plan_.sources.back().get()};
  }

  // The values of a model's tensor with its own rows.
  const Source* whole(std::size_t model, const ModelTensor* tensor) {
    auto& source = sources_[tensor];
    if (source == nullptr) {
      if (tensor->is_adapted) {
        plan_.sources.push_back(named_[model].adapter->source(tensor->name));
      } else {
        plan_.sources.push_back(std::make_unique<StoredTensor>(*tensor->view, is_float(tensor->dtype) ? section_.dtype : std::nullopt));
      }
      source = plan_.sources.back().get();
    }
    return source;
  }

  const Source* statistics_of(const SliceSource& source, const std::string& tensor, const std::vector<std::int64_t>& shape) {
    if (!source.statistics) return nullptr;
    auto& file = statistics_[*source.statistics];
    if (file == nullptr) {
      file = std::make_shared<io::SafetensorsFile>(io::SafetensorsFile::open(*source.statistics));
      plan_.statistics.push_back(file);
    }
    const auto* view = file->find(tensor);
    if (view == nullptr) {
      if (method_.statistics == Method::Statistics::kGram) return nullptr;  // averaged, as biases and norms are
      fail("{}: holds no \"{}\", expected the Fisher information of every tensor", file->path().string(), tensor);
    }
    const auto in = shape.empty() ? 1 : shape.back();
    const auto expected = method_.statistics == Method::Statistics::kGram ? std::vector<std::int64_t>{in, in} : shape;
    if (view->shape != expected) {
      fail("{}: \"{}\" is {}, expected {}", file->path().string(), tensor, io::shape_text(view->shape), io::shape_text(expected));
    }
    plan_.sources.push_back(std::make_unique<StoredTensor>(*view));
    return plan_.sources.back().get();
  }

  // --- the end

  void fail_with(const std::vector<std::string>& problems, std::string_view what, std::string_view repair) const {
    if (problems.empty()) return;
    constexpr std::size_t kShown = 5;
    const auto shown = std::span(problems).first(std::min(problems.size(), kShown));
    fail("{}: {} {}: {}{}; {}", section_.where, problems.size(), what, fmt::join(shown, "; "),
         problems.size() > kShown ? fmt::format("; and {} more", problems.size() - kShown) : "", repair);
  }

  void check_filters() {
    std::vector<const ParameterLevel*> levels{&section_.parameters};
    for (const auto& module : section_.modules) {
      levels.push_back(&module.parameters);
      for (const auto& slice : module.slices) {
        levels.push_back(&slice.parameters);
        for (const auto& source : slice.sources) levels.push_back(&source.parameters);
      }
    }
    std::erase_if(levels, [](const ParameterLevel* level) { return !level->has_filters(); });
    if (levels.empty()) return;
    std::set<std::string> names;
    for (const auto& tensor : plan_.tensors) names.insert(tensor.name);
    names.insert(source_names_.begin(), source_names_.end());
    for (const auto* level : levels) {
      for (auto& warning : level->check_filters(names)) plan_.warnings.push_back(std::move(warning));
    }
  }

  void edit_config() {
    auto config = plan_.models[donor()].folder->config();
    for (const auto& [stack, count] : num_layers_) {
      const auto key = layer_count_key(config, stack);
      if (key.empty()) {
        plan_.warnings.push_back(fmt::format("{}: config.json has no key for the number of layers; set it to {}", plan_.donor.string(), count));
        continue;
      }
      const auto before = config[key].get<std::int64_t>();
      for (auto& [name, value] : config.items()) {  // lists with an entry per layer
        if (!value.is_array() || static_cast<std::int64_t>(value.size()) != before || name.find("layer") == std::string::npos) continue;
        Json sliced = Json::array();
        for (const auto layer : origins_[stack]) sliced.push_back(layer < before ? value[static_cast<std::size_t>(layer)] : Json());
        value = std::move(sliced);
      }
      config[key] = count;
    }
    std::map<DType, std::uint64_t> bytes;
    for (const auto& tensor : plan_.tensors) {
      if (is_float(tensor.dtype)) bytes[tensor.dtype] += tensor.num_bytes();
    }
    if (!bytes.empty()) {
      const auto most = std::ranges::max_element(bytes, {}, [](const auto& entry) { return entry.second; });
      config[config.contains("dtype") ? "dtype" : "torch_dtype"] = torch_dtype_name(most->first);
    }
    if (unties_) config["tie_word_embeddings"] = false;
    if (vocabulary_) {
      for (const auto& [pointer, value] : vocabulary_->config_edits) config[Json::json_pointer(pointer)] = value;
      for (auto& file : vocabulary_->written_files) plan_.written_files.push_back(std::move(file));
      for (const auto& file : vocabulary_->copied_files) {
        plan_.written_files.emplace_back(file.string(), io::read_file(vocabulary_->tokenizer_folder / file));
      }
    }
    plan_sidecar_files(plan_, config, vocabulary_.has_value());
    if (!section_.chat_template.empty()) plan_chat_template(plan_, section_.chat_template, section_.where + "/chat_template");
  }

  struct BufferPair {
    std::string name;
    std::size_t model;
    const ModelTensor* view;
    std::size_t other;
    const ModelTensor* other_view;
  };

  const MergeSection& section_;
  const Method& method_;
  std::uint64_t seed_;
  MergePlan plan_;
  std::vector<NamedModel> named_;
  std::map<std::pair<std::size_t, std::string>, std::map<std::int64_t, std::vector<std::string>>> rests_;
  std::unordered_map<const ModelTensor*, const Source*> sources_;
  std::map<fs::path, std::shared_ptr<const io::SafetensorsFile>> statistics_;
  std::map<std::string, std::int64_t> num_layers_;             // stack -> layers written, where slices cut it
  std::map<std::string, std::vector<std::int64_t>> origins_;   // stack -> the first source's layer of each layer written
  std::set<std::string> source_names_;  // of layers that slices put elsewhere
  std::vector<std::string> missing_, mismatched_;
  std::vector<BufferPair> buffers_;
  std::optional<VocabularyPlan> vocabulary_;
  bool unties_ = false;
};

}  // namespace

std::uint64_t PlannedTensor::num_bytes() const {
  std::uint64_t count = io::dtype_size(dtype);
  for (const auto dimension : shape) count *= static_cast<std::uint64_t>(dimension);
  return count;
}

MergePlan plan_merge(const MergeSection& section, std::uint64_t seed) { return Planner(section, seed).plan(); }

}  // namespace mergex::merging
