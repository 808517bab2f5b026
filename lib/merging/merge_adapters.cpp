#include "merging/merge_adapters.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "core/error.h"
#include "core/one_line.h"
#include "core/suggest.h"
#include "io/atomic_file.h"
#include "merging/adapter_source.h"
#include "merging/low_rank.h"
#include "merging/source.h"
#include "merging/span_kernels.h"

namespace mergex::merging {
namespace fs = std::filesystem;
namespace {

constexpr Parameter kWeights[] = {{.name = "weight",
                                   .scope = Parameter::Scope::kInput,
                                   .kind = Parameter::Kind::kNumber,
                                   .fallback = 1.0,
                                   .summary = "factor of the adapter's delta; may be negative"}};

// Methods that see nothing but task vectors: a delta is one, from a base of zeros.
constexpr std::string_view kTaskVectorMethods[] = {"task_arithmetic", "ties",         "dare_linear", "dare_ties",       "della",
                                                   "della_linear",    "breadcrumbs", "breadcrumbs_ties", "sce"};

constexpr std::int64_t kTile = 16384;

std::string file_of(const io::AdapterFolder& adapter) { return adapter.weights_file().string(); }

template <class T>
std::vector<T> all_values(const io::TensorView& view) {
  std::vector<T> values(static_cast<std::size_t>(view.num_elements()));
  StoredTensor(view).read(0, view.num_elements(), values.data());
  return values;
}

/// A tensor of the result.
struct Written {
  io::DType dtype = io::DType::kF32;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
};

Written written(io::DType dtype, std::vector<std::int64_t> shape, std::span<const double> values) {
  Written result{dtype, std::move(shape), std::vector<std::byte>(values.size() * io::dtype_size(dtype))};
  narrow_values(dtype, static_cast<std::int64_t>(values.size()), values.data(), result.bytes.data());
  return result;
}

/// A method applied to arrays in memory, with a base of zeros, on one thread.
std::vector<float> merge_deltas(const Method& method, const TensorContext& context,
                                const std::vector<std::vector<float>>& deltas) {
  if (method.model_state != nullptr && method.model_state(context) != nullptr) {
    fail("\"{}_svd\": these parameters take thresholds or votes over the whole model, but adapters are merged one module at a "
         "time; use dialect mergekit and trim_scope tensor", method.name);
  }
  const auto merge = method.make_float(context, nullptr);
  const auto needs = merge->needs();
  const auto total = context.num_elements();
  const auto row = needs.whole_rows ? std::max<std::int64_t>(1, context.row_length()) : 1;
  const auto tile_length = std::max(row, kTile / row * row);
  const std::vector<float> zeros(static_cast<std::size_t>(tile_length), 0.0f);
  std::vector<float> scratch(needs.scratch * static_cast<std::size_t>(tile_length)), result(static_cast<std::size_t>(total));
  std::vector<double> sums(needs.sums);
  std::vector<std::uint32_t> counts(needs.counts);
  std::vector<std::int64_t> state(needs.state);
  std::vector<std::vector<std::uint64_t>> lists(needs.lists);
  std::vector<const float*> inputs(deltas.size());
  const auto over_tiles = [&](auto&& body) {  // all of them in one unit
    std::ranges::fill(sums, 0.0);
    std::ranges::fill(counts, 0u);
    std::ranges::fill(state, 0);
    lists.assign(needs.lists, {});
    for (std::int64_t begin = 0; begin < total; begin += tile_length) {
      for (std::size_t i = 0; i < deltas.size(); ++i) inputs[i] = deltas[i].data() + begin;
      body(Tile<float>{.begin = begin,
                       .count = std::min(tile_length, total - begin),
                       .unit = 0,
                       .opens_unit = begin == 0,
                       .base = zeros.data(),
                       .inputs = inputs},
           Workspace<float>{.sums = sums, .counts = counts, .state = state, .scratch = scratch, .lists = lists});
    }
  };
  for (int pass = 0; pass < needs.passes; ++pass) {
    if (!merge->wants(pass)) continue;
    over_tiles([&](const Tile<float>& tile, const Workspace<float>& work) { merge->gather(pass, tile, work); });
    const std::vector<std::uint64_t> wide(counts.begin(), counts.end());
    merge->finish(pass, {.sums = sums, .unit_sums = sums, .counts = wide, .unit_lists = lists});
  }
  over_tiles([&](const Tile<float>& tile, const Workspace<float>& work) { merge->merge(tile, work, result.data() + tile.begin); });
  return result;
}

/// scaling B A, [out, in]
std::vector<float> delta_of(const io::LoraModule& module) {
  const auto rank = module.rank(), in = module.num_inputs(), out = module.num_outputs();
  const auto a = all_values<float>(*module.a), b = all_values<float>(*module.b);
  std::vector<float> delta(static_cast<std::size_t>(out * in), 0.0f);
  for (std::int64_t o = 0; o < out; ++o) {
    for (std::int64_t k = 0; k < rank; ++k) {
      const auto factor = static_cast<float>(module.scaling) * b[static_cast<std::size_t>(o * rank + k)];
      span_kernels<float>().multiply_add(in, a.data() + k * in, factor, delta.data() + o * in);
    }
  }
  return delta;
}

class AdapterMerge {
 public:
  AdapterMerge(std::span<const AdapterInput> inputs, const MergeAdaptersOptions& options) : options_(options) {
    for (const auto& input : inputs) {
      check_density(input);
      // A delta times 0 needs no rank.
      if (is_sum() && weight(input) == 0.0) continue;
      inputs_.push_back(&input);
    }
    if (inputs.empty()) fail("no adapter to merge; give at least one");
    if (inputs_.empty()) fail("every adapter has weight 0, so that nothing would be left; give at least one another weight");
    check_dora();
    for (const auto* input : inputs_) {
      if (options_.base) on_base_.push_back(std::make_unique<AppliedAdapter>(
            input->adapter, options_.base, AppliedAdapter::TiedWeights::kUntie));
      for (const auto& module : input->adapter->modules()) {
        wide_ |= module.a->dtype == io::DType::kF64;
        has_bias_ |= module.bias != nullptr;
        check_finite(*input->adapter, module);
      }
    }
  }

  std::vector<MergedModule> run(const fs::path& out) {
    std::vector<MergedModule> merged;
    for (const auto& [name, modules] : modules_by_name()) merged.push_back(merge_module(name, modules));
    merge_whole_tensors();
    write(merged, out);
    return merged;
  }

 private:
  using Modules = std::vector<const io::LoraModule*>;  // one per input; nullptr: it has none

  bool is_sum() const { return options_.mode.method == nullptr; }
  static double weight(const AdapterInput& input) { return input.parameters["weight"]; }
  const io::AdapterFolder& first() const { return *inputs_.front()->adapter; }

  void check_density(const AdapterInput& input) const {
    for (const auto& [name, value] : input.parameters.all()) {
      if (name == "density" && value == 0.0) {
        fail("{}: density is 0, so that nothing of the adapter would be kept; expected more than 0 and at most 1", input.name);
      }
    }
  }

  // An SVD has no answer for them.
  static void check_finite(const io::AdapterFolder& adapter, const io::LoraModule& module) {
    for (const auto* factor : {module.a, module.b}) {
      const auto values = all_values<double>(*factor);
      if (std::ranges::all_of(values, [](double value) { return std::isfinite(value); })) continue;
      fail("{}: tensor \"{}\" holds values that are not finite; the adapter is broken, train it again", file_of(adapter),
           one_line(factor->name));
    }
  }

  void check_dora() const {
    for (const auto* input : inputs_) {
      if (!input->adapter->use_dora() || (inputs_.size() == 1 && is_sum() && weight(*input) == 1.0)) continue;
      fail("{}: is a DoRA adapter, whose change of weights is no product of two factors, so that \"{}\" cannot carry it unless "
           "alone and with weight 1; merge the models with their adapters instead (base+adapter)", input->name,
           options_.mode.name);
    }
  }

  std::map<std::string, Modules> modules_by_name() const {
    std::map<std::string, Modules> all;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      for (const auto& module : inputs_[i]->adapter->modules()) {
        auto& modules = all[module.name];
        modules.resize(inputs_.size(), nullptr);
        modules[i] = &module;
        const auto first_with = static_cast<std::size_t>(
            std::ranges::find_if(modules, [](const auto* m) { return m != nullptr; }) - modules.begin());
        const auto& other = *modules[first_with];
        if (other.num_inputs() != module.num_inputs() || other.num_outputs() != module.num_outputs() ||
            other.is_embedding != module.is_embedding) {
          fail("{}: module \"{}\" maps {} inputs to {} outputs, but {} to {} in {}; the adapters belong to different bases",
               file_of(*inputs_[i]->adapter), one_line(module.name), module.num_inputs(), module.num_outputs(),
               other.num_inputs(), other.num_outputs(), file_of(*inputs_[first_with]->adapter));
        }
      }
    }
    return all;
  }

  MergedModule merge_module(const std::string& name, const Modules& modules) {
    const auto& any = **std::ranges::find_if(modules, [](const auto* m) { return m != nullptr; });
    const auto in = any.num_inputs(), out = any.num_outputs();
    std::int64_t largest = 0, terms = 0;
    for (const auto* module : modules) {
      if (module == nullptr) continue;
      largest = std::max(largest, module->rank());
      terms += module->rank();
    }
    const auto rank = options_.rank > 0 ? options_.rank : largest;
    LowRank product;
    if (is_sum()) {
      const auto [left, right] = concatenated(modules, terms);
      product = best_product(left, right, out, in, terms, options_.mode.keeps_all_ranks ? terms : rank);
      if (options_.mode.keeps_all_ranks) {
        product.rank = terms;
        product.left = left;
        product.right = right;
        product.relative_error = 0.0;
      }
    } else {
      std::vector<std::vector<float>> deltas;
      for (const auto* module : modules) {
        deltas.push_back(module != nullptr ? delta_of(*module) : std::vector<float>(static_cast<std::size_t>(out * in), 0.0f));
      }
      product = best_matrix(merged_by_method(name + ".weight", {out, in}, deltas), out, in, rank);
    }
    const auto dtype = wide_ ? io::DType::kF64 : io::DType::kF32;
    const std::string a = any.is_embedding ? ".lora_embedding_A" : ".lora_A.weight";
    const std::string b = any.is_embedding ? ".lora_embedding_B" : ".lora_B.weight";
    tensors_[name + a] = written(dtype, {product.rank, in}, product.right);
    tensors_[name + b] = written(dtype, {out, product.rank}, product.left);
    if (any.magnitude != nullptr) {
      tensors_[name + ".lora_magnitude_vector"] = written(dtype, any.magnitude->shape, all_values<double>(*any.magnitude));
    }
    if (has_bias_ && any.is_embedding) {
      fail("module \"{}\" is an embedding, and another adapter has biases of B (lora_bias), which PEFT does not allow together; "
           "merge the models with their adapters instead (base+adapter)", one_line(name));
    }
    if (has_bias_) tensors_[name + ".lora_B.bias"] = written(dtype, {out}, merged_bias(name, modules, out));
    return {name, product.rank, product.norm, product.relative_error};
  }

  /// [B_1 B_2 ...] and [w_1 s_1 A_1; w_2 s_2 A_2; ...]
  std::pair<std::vector<double>, std::vector<double>> concatenated(const Modules& modules, std::int64_t terms) const {
    const auto& any = **std::ranges::find_if(modules, [](const auto* m) { return m != nullptr; });
    std::vector<double> left(static_cast<std::size_t>(any.num_outputs() * terms)), right;
    std::int64_t first = 0;
    for (std::size_t i = 0; i < modules.size(); ++i) {
      if (modules[i] == nullptr) continue;
      const auto rank = modules[i]->rank();
      const auto b = all_values<double>(*modules[i]->b);
      for (std::int64_t o = 0; o < any.num_outputs(); ++o) {
        std::copy_n(b.begin() + o * rank, rank, left.begin() + o * terms + first);
      }
      const double factor = weight(*inputs_[i]) * modules[i]->scaling;
      for (const double value : all_values<double>(*modules[i]->a)) right.push_back(factor * value);
      first += rank;
    }
    return {std::move(left), std::move(right)};
  }

  std::vector<float> merged_by_method(const std::string& tensor, std::vector<std::int64_t> shape,
                                      const std::vector<std::vector<float>>& deltas) const {
    const auto& method = *options_.mode.method;
    TensorContext context{.name = tensor, .shape = std::move(shape), .has_base = true, .shared = options_.shared,
                          .dialect = options_.dialect, .seed = options_.seed};
    for (const auto* input : inputs_) context.inputs.push_back({.identity = input->name, .parameters = input->parameters});
    if (method.problem != nullptr) {
      if (const auto problem = method.problem(context); !problem.empty()) fail("{}: {}", options_.mode.name, problem);
    }
    return merge_deltas(method, context, deltas);
  }

  std::vector<double> merged_bias(const std::string& name, const Modules& modules, std::int64_t out) const {
    std::vector<double> sum(static_cast<std::size_t>(out), 0.0);
    std::vector<std::vector<float>> deltas;
    for (std::size_t i = 0; i < modules.size(); ++i) {
      std::vector<float> delta(sum.size(), 0.0f);
      if (modules[i] != nullptr && modules[i]->bias != nullptr) {
        const auto values = all_values<double>(*modules[i]->bias);
        for (std::size_t j = 0; j < sum.size(); ++j) {
          if (is_sum()) sum[j] += weight(*inputs_[i]) * modules[i]->scaling * values[j];
          delta[j] = static_cast<float>(modules[i]->scaling * values[j]);
        }
      }
      deltas.push_back(std::move(delta));
    }
    if (is_sum()) return sum;
    const auto merged = merged_by_method(name + ".bias", {out}, deltas);
    return {merged.begin(), merged.end()};
  }

  void merge_whole_tensors() {
    std::set<std::string> names;
    for (const auto* input : inputs_) {
      for (const auto& [name, tensor] : input->adapter->replaced()) names.insert(name);
    }
    for (const auto& name : names) merge_whole_tensor(name);
  }

  void merge_whole_tensor(const std::string& name) {
    std::vector<const io::TensorView*> views;  // one per input; nullptr: it leaves the base's
    const io::TensorView *any = nullptr, *base = nullptr;
    double sum_of_weights = 0.0;
    bool all_have_it = true;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const auto& replaced = inputs_[i]->adapter->replaced();
      const auto found = replaced.find(name);
      views.push_back(found == replaced.end() ? nullptr : found->second);
      if (is_sum()) sum_of_weights += weight(*inputs_[i]);
      if (views.back() == nullptr) {
        all_have_it = false;
        continue;
      }
      if (any == nullptr) any = views.back();
      if (any->shape != views.back()->shape) {
        fail("{}: tensor \"{}\" is {}, but {} in another adapter; they cannot be merged", file_of(*inputs_[i]->adapter),
             one_line(name), io::shape_text(views.back()->shape), io::shape_text(any->shape));
      }
      if (i < on_base_.size()) {
        for (const auto& [tensor, change] : on_base_[i]->changes()) {
          if (change.replaced == views.back()) base = change.base;
        }
      }
    }
    const auto size = static_cast<std::size_t>(any->num_elements());
    std::vector<double> merged(size, 0.0);
    if (is_sum() && all_have_it && std::abs(sum_of_weights - 1.0) < 1e-12) {
      for (std::size_t i = 0; i < views.size(); ++i) {
        const auto values = all_values<double>(*views[i]);
        for (std::size_t j = 0; j < size; ++j) merged[j] += weight(*inputs_[i]) * values[j];
      }
    } else {
      if (base == nullptr || base->shape != any->shape) {
        fail("{}: tensor \"{}\" is stored whole, and its change is counted from the base; {}", file_of(first()), one_line(name),
             options_.base == nullptr ? "give the base, or weights that sum to 1 in mode cat or svd"
                                      : "the base has none of this shape, so take weights that sum to 1 in mode cat or svd");
      }
      merged = all_values<double>(*base);
      std::vector<std::vector<float>> deltas(views.size(), std::vector<float>(size, 0.0f));
      const auto start = merged;
      for (std::size_t i = 0; i < views.size(); ++i) {
        if (views[i] == nullptr) continue;
        const auto values = all_values<double>(*views[i]);
        for (std::size_t j = 0; j < size; ++j) {
          if (is_sum()) merged[j] += weight(*inputs_[i]) * (values[j] - start[j]);
          deltas[i][j] = static_cast<float>(values[j] - start[j]);
        }
      }
      if (!is_sum()) {
        const auto delta = merged_by_method(name, any->shape, deltas);
        for (std::size_t j = 0; j < size; ++j) merged[j] += static_cast<double>(delta[j]);
      }
    }
    // PEFT finds the weights of a module with an adapter below "base_layer".
    auto stored = name;
    const auto dot = name.rfind('.');
    if (is_target(name.substr(0, dot))) stored.insert(dot, ".base_layer");
    tensors_[stored] = written(any->dtype, any->shape, merged);
  }

  bool is_target(const std::string& module) const {
    return tensors_.contains(module + ".lora_A.weight") || tensors_.contains(module + ".lora_embedding_A");
  }

  io::Json config(const std::vector<MergedModule>& merged) const {
    auto json = io::Json::object();
    json["peft_type"] = "LORA";
    for (const char* key : {"task_type", "base_model_name_or_path", "revision", "auto_mapping"}) {
      json[key] = first().config().contains(key) ? first().config()[key] : io::Json();
    }
    json["inference_mode"] = true;
    std::int64_t largest = 1;
    for (const auto& module : merged) largest = std::max(largest, module.rank);
    auto ranks = io::Json::object();
    auto targets = io::Json::array();
    for (const auto& module : merged) {
      targets.push_back(module.name);
      if (module.rank != largest) ranks[pattern_of(module.name)] = module.rank;
    }
    json["r"] = largest;
    json["lora_alpha"] = largest;
    json["rank_pattern"] = ranks;
    json["alpha_pattern"] = ranks;  // every scaling is 1
    json["target_modules"] = targets;
    json["lora_dropout"] = 0.0;
    json["init_lora_weights"] = true;
    json["use_rslora"] = false;
    json["use_dora"] = first().use_dora();
    json["lora_bias"] = has_bias_;
    json["fan_in_fan_out"] = first().fan_in_fan_out();
    std::string bias = "none";
    std::set<std::string> saved;
    bool tying = true;
    for (const auto* input : inputs_) {
      if (input->adapter->bias() == "all" || bias == "none") bias = input->adapter->bias();
      saved.insert(input->adapter->modules_to_save().begin(), input->adapter->modules_to_save().end());
      tying &= input->adapter->ensures_weight_tying();
    }
    json["bias"] = bias;
    json["modules_to_save"] = saved.empty() ? io::Json() : io::Json(saved);
    if (tying) json["ensure_weight_tying"] = true;
    return json;
  }

  /// A name as a regular expression that fits it alone.
  static std::string pattern_of(const std::string& module) {
    std::string pattern = "^";
    for (const char c : module) pattern += c == '.' ? std::string("\\.") : std::string(1, c);
    return pattern;
  }

  void write(const std::vector<MergedModule>& merged, const fs::path& out) const {
    const fs::path partial = out.string() + ".partial";
    try {
      fs::remove_all(partial);
      fs::create_directories(partial);
      std::vector<io::TensorView> views;
      for (const auto& [name, tensor] : tensors_) {
        views.push_back({"base_model.model." + name, tensor.dtype, tensor.shape, tensor.bytes});
      }
      io::write_safetensors(partial / "adapter_model.safetensors", views);
      io::write_json(partial / "adapter_config.json", config(merged));
      fs::rename(partial, out);  // over an empty folder, too
      io::sync_folder(fs::absolute(out).parent_path());
    } catch (...) {
      std::error_code ignored;
      fs::remove_all(partial, ignored);
      throw;
    }
  }

  const MergeAdaptersOptions& options_;
  std::vector<const AdapterInput*> inputs_;
  std::vector<std::unique_ptr<AppliedAdapter>> on_base_;  // one per input where a base is given
  bool wide_ = false, has_bias_ = false;
  std::map<std::string, Written> tensors_;
};

}  // namespace

std::vector<AdapterMode> adapter_modes() {
  std::vector<AdapterMode> modes{
      {"cat", "ranks side by side: the weighted sum of the deltas, exactly", nullptr, true, kWeights},
      {"svd", "the weighted sum of the deltas, cut to the best of the given rank", nullptr, false, kWeights}};
  for (const auto name : kTaskVectorMethods) {
    const auto& method = find_method(name, "adapter_modes");
    modes.push_back({fmt::format("{}_svd", name), fmt::format("{}, on deltas; cut to the best of the given rank", method.summary),
                     &method, false, method.parameters});
  }
  return modes;
}

AdapterMode find_adapter_mode(std::string_view name, std::string_view where) {
  if (name == "linear") {
    fail("{}: got \"linear\", which in PEFT averages A's and B's apart and so adds products that no adapter has; expected \"cat\" "
         "(exact) or \"svd\" (of a given rank)", where);
  }
  std::vector<std::string> names;
  for (auto& mode : adapter_modes()) {
    if (mode.name == name) return mode;
    names.push_back(mode.name);
  }
  fail("{}: got \"{}\", no such way to merge adapters{}; expected {}", where, one_line(name), did_you_mean(name, names),
       quoted_list(names));
}

std::vector<MergedModule> merge_adapters(std::span<const AdapterInput> inputs, const MergeAdaptersOptions& options,
                                         const fs::path& folder) {
  const auto out = folder.has_filename() ? folder : folder.parent_path();  // "out/" is "out"
  std::error_code ignored;
  if (fs::exists(out, ignored) && !(fs::is_directory(out, ignored) && fs::is_empty(out, ignored))) {
    fail("{}: is there already and not empty; choose another folder or remove it", one_line(out.string()));
  }
  return AdapterMerge(inputs, options).run(out);
}

}  // namespace mergex::merging
