#include "merging/adapter_source.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <stdexcept>

#include "core/error.h"
#include "core/one_line.h"
#include "core/suggest.h"
#include "merging/span_kernels.h"

namespace mergex::merging {
namespace {

// Rows of the weight that share one copy of the other factor.
constexpr std::int64_t kRowBlock = 256;
// Columns of the weight that are computed at a time: this part of the other factor stays in a first-level cache.
constexpr std::int64_t kColumnBlock = 256;
// Values that are summed at a time for the norms of DoRA.
constexpr std::int64_t kNormBlock = 1 << 16;

template <class T>
void widen_part(const io::TensorView& view, std::int64_t begin, std::int64_t count, T* out) {
  widen_values(view.dtype, count, view.bytes.data() + static_cast<std::size_t>(begin) * io::dtype_size(view.dtype), out);
}

/// weight + scaling * left * right, of which one factor is stored as it is and the other transposed or neither is: the
/// weight is [out, in] and left = B, right = A, or it is [in, out] and left = A^T, right = B^T. With magnitudes, DoRA.
/// Every value is the same whatever range it is read in: products are added in the order of the rank.
class LowRankSource final : public Source {
 public:
  LowRankSource(const io::TensorView& weight, const io::LoraModule& module, bool transposed)
      : weight_(weight), module_(module), transposed_(transposed), num_columns_(weight.shape[1]) {}

  void read(std::int64_t begin, std::int64_t count, float* out) const override { read_values(begin, count, out); }
  void read(std::int64_t begin, std::int64_t count, double* out) const override { read_values(begin, count, out); }

 private:
  template <class T>
  void read_values(std::int64_t begin, std::int64_t count, T* out) const {
    read_sum(begin, count, out);
    if (module_.magnitude == nullptr) return;
    std::call_once(once_, [this] { compute_factors(); });
    for_rows(begin, count, [&](std::int64_t row, std::int64_t column, std::int64_t n, std::int64_t at) {
      if (transposed_) {
        for (std::int64_t i = 0; i < n; ++i) out[at + i] *= static_cast<T>(factors_[static_cast<std::size_t>(column + i)]);
      } else {
        span_kernels<T>().scale(n, static_cast<T>(factors_[static_cast<std::size_t>(row)]), out + at);
      }
    });
  }

  /// Calls f(row, first column, number of columns, offset from begin) for the pieces of rows in a range.
  template <class F>
  void for_rows(std::int64_t begin, std::int64_t count, const F& f) const {
    for (std::int64_t at = 0; at < count;) {
      const auto row = (begin + at) / num_columns_, column = (begin + at) % num_columns_;
      const auto n = std::min(num_columns_ - column, count - at);
      f(row, column, n, at);
      at += n;
    }
  }

  template <class T>
  void read_sum(std::int64_t begin, std::int64_t count, T* out) const {
    weight_.read(begin, count, out);
    if (count == 0) return;
    const auto& kernels = span_kernels<T>();
    const auto rank = module_.rank();
    const auto end = begin + count, last_row = (end - 1) / num_columns_;
    std::vector<T> left, right;
    std::array<T, kColumnBlock> product;
    for (auto row = begin / num_columns_; row <= last_row; row += kRowBlock) {
      const auto num_rows = std::min(kRowBlock, last_row + 1 - row);
      read_left(row, num_rows, left);
      for (std::int64_t column = 0; column < num_columns_; column += kColumnBlock) {
        const auto width = std::min(kColumnBlock, num_columns_ - column);
        bool have_right = false;  // a range of few values may touch few blocks
        for (std::int64_t r = 0; r < num_rows; ++r) {
          const auto block = (row + r) * num_columns_ + column;  // flat index of this row's part
          const auto from = std::max(begin, block), to = std::min(end, block + width);
          if (from >= to) continue;
          if (!have_right) read_right(column, width, right);
          have_right = true;
          std::fill_n(product.begin(), to - from, T{0});
          for (std::int64_t k = 0; k < rank; ++k) {
            kernels.multiply_add(to - from, right.data() + k * width + (from - block),
                                 left[static_cast<std::size_t>(k * num_rows + r)], product.data());
          }
          kernels.add(to - from, product.data(), out + (from - begin));
        }
      }
    }
  }

  /// scaling * left[row + r, k] at [k * num_rows + r]
  template <class T>
  void read_left(std::int64_t row, std::int64_t num_rows, std::vector<T>& left) const {
    read_factor(transposed_ ? *module_.a : *module_.b, transposed_, row, num_rows, left);
    span_kernels<T>().scale(static_cast<std::int64_t>(left.size()), static_cast<T>(module_.scaling), left.data());
  }

  /// right[k, column + c] at [k * width + c]
  template <class T>
  void read_right(std::int64_t column, std::int64_t width, std::vector<T>& right) const {
    read_factor(transposed_ ? *module_.b : *module_.a, !transposed_, column, width, right);
  }

  /// `count` rows or columns of a factor as [rank, count]. @param by_rank  it is stored [rank, n], not [n, rank]
  template <class T>
  void read_factor(const io::TensorView& factor, bool by_rank, std::int64_t begin, std::int64_t count,
                   std::vector<T>& out) const {
    const auto rank = module_.rank();
    out.resize(static_cast<std::size_t>(rank * count));
    if (by_rank) {
      for (std::int64_t k = 0; k < rank; ++k) widen_part(factor, k * factor.shape[1] + begin, count, out.data() + k * count);
      return;
    }
    std::vector<T> stored(out.size());
    widen_part(factor, begin * rank, rank * count, stored.data());
    for (std::int64_t k = 0; k < rank; ++k) {
      for (std::int64_t i = 0; i < count; ++i) {
        out[static_cast<std::size_t>(k * count + i)] = stored[static_cast<std::size_t>(i * rank + k)];
      }
    }
  }

  void compute_factors() const {
    std::vector<double> squares(static_cast<std::size_t>(module_.num_outputs()), 0.0), values(kNormBlock);
    const auto size = module_.num_inputs() * module_.num_outputs();
    for (std::int64_t begin = 0; begin < size; begin += kNormBlock) {
      const auto count = std::min(kNormBlock, size - begin);
      read_sum(begin, count, values.data());
      for_rows(begin, count, [&](std::int64_t row, std::int64_t column, std::int64_t n, std::int64_t at) {
        for (std::int64_t i = 0; i < n; ++i) {
          const auto value = values[static_cast<std::size_t>(at + i)];
          squares[static_cast<std::size_t>(transposed_ ? column + i : row)] += value * value;
        }
      });
    }
    factors_.resize(squares.size());
    widen_part(*module_.magnitude, 0, module_.num_outputs(), factors_.data());
    for (std::size_t i = 0; i < squares.size(); ++i) {
      factors_[i] = squares[i] == 0.0 ? 0.0 : factors_[i] / std::sqrt(squares[i]);
    }
  }

  StoredTensor weight_;
  io::LoraModule module_;
  bool transposed_;
  std::int64_t num_columns_;
  mutable std::once_flag once_;
  mutable std::vector<double> factors_;  // magnitude / norm of each output
};

/// bias + scaling * bias of B
class BiasSource final : public Source {
 public:
  BiasSource(const io::TensorView& bias, const io::LoraModule& module) : bias_(bias), module_(module) {}

  void read(std::int64_t begin, std::int64_t count, float* out) const override { read_values(begin, count, out); }
  void read(std::int64_t begin, std::int64_t count, double* out) const override { read_values(begin, count, out); }

 private:
  template <class T>
  void read_values(std::int64_t begin, std::int64_t count, T* out) const {
    bias_.read(begin, count, out);
    std::vector<T> learned(static_cast<std::size_t>(count));
    widen_part(*module_.bias, begin, count, learned.data());
    span_kernels<T>().scale(count, static_cast<T>(module_.scaling), learned.data());
    span_kernels<T>().add(count, learned.data(), out);
  }

  StoredTensor bias_;
  io::LoraModule module_;
};

constexpr std::string_view kPrefixes[] = {"model.", "transformer.", "roberta.", "bert.", "language_model.", "module.",
                                          "_orig_mod."};
constexpr std::string_view kEmbeddings[] = {"embed_tokens", "wte", "shared", "word_embeddings", "embed_in"};
constexpr std::string_view kHeads[] = {"lm_head", "embed_out"};

// Models whose linear layers of these names are stored [in, out].
constexpr std::string_view kConv1dFamilies[] = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"};
constexpr std::string_view kConv1dModules[] = {"c_attn", "c_proj", "c_fc", "q_attn"};

bool is_one_of(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

/// "a.b.c.weight" -> "a.b.c"
std::string_view module_of(std::string_view tensor) { return tensor.substr(0, std::min(tensor.rfind('.'), tensor.size())); }

/// "a.b.c" -> "c"
std::string_view last_part(std::string_view module) { return module.substr(module.rfind('.') + 1); }

bool is_embedding_module(std::string_view module) { return is_one_of(kEmbeddings, last_part(module)); }
bool is_head_module(std::string_view module) { return is_one_of(kHeads, last_part(module)); }

bool is_floating(io::DType dtype) {
  return dtype == io::DType::kF16 || dtype == io::DType::kBF16 || dtype == io::DType::kF32 || dtype == io::DType::kF64;
}

/// Merged adapters have a bias of B in all modules where one input has one.
bool is_zero(const io::TensorView& view) {
  std::vector<double> values(static_cast<std::size_t>(view.num_elements()));
  widen_part(view, 0, view.num_elements(), values.data());
  return std::ranges::all_of(values, [](double value) { return value == 0.0; });
}

/// Whether the embedding is the head as well. Where config.json leaves it open, a language model without a stored head has
/// no other.
bool ties_embedding(const io::CheckpointFolder& base) {
  const auto& config = base.config();
  if (const auto flag = config.find("tie_word_embeddings"); flag != config.end() && flag->is_boolean()) return flag->get<bool>();
  for (const auto* tensor : base.tensors()) {
    if (tensor->name.ends_with(".weight") && is_head_module(module_of(tensor->name))) return false;
  }
  const auto architectures = config.find("architectures");
  if (architectures == config.end() || !architectures->is_array()) return true;
  return std::ranges::any_of(*architectures, [](const io::Json& name) {
    if (!name.is_string()) return false;
    const auto& text = name.get_ref<const std::string&>();
    return text.find("LM") != std::string::npos || text.ends_with("ForConditionalGeneration");
  });
}

}  // namespace

AppliedAdapter::AppliedAdapter(std::shared_ptr<const io::AdapterFolder> adapter,
                               std::shared_ptr<const io::CheckpointFolder> base, TiedWeights tied)
    : adapter_(std::move(adapter)), base_(std::move(base)) {
  pair_whole_tensors();
  pair_modules();
  if (ties_embedding(*base_)) untie(tied);
  for (const auto& [name, change] : changes_) {
    if (change.base == nullptr || change.base->shape == change.shape) continue;
    // The rows of a vocabulary or of a head may be others; a vector may follow the matrix that it belongs to.
    const auto matrix = changes_.find(std::string(module_of(name)) + ".weight");
    const bool other_rows = change.shape.size() == change.base->shape.size() && !change.shape.empty() &&
                            std::equal(change.shape.begin() + 1, change.shape.end(), change.base->shape.begin() + 1);
    const bool follows = change.shape.size() > 1 ||
                         (matrix != changes_.end() && matrix->second.shape.size() > 1 && matrix->second.shape[0] == change.shape[0]);
    if (!other_rows || !follows) {
      fail("{}: tensor \"{}\" is {}, but {} in {}; the adapter belongs to another base", adapter_->weights_file().string(),
           one_line(change.replaced->name), io::shape_text(change.shape), io::shape_text(change.base->shape),
           base_->file_of(name));
    }
  }
}

/// The base's name of a tensor that the adapter calls `tensor`; "" where it has none.
std::string AppliedAdapter::base_name(const std::string& tensor) const {
  if (base_->find(tensor) != nullptr) return tensor;
  for (const auto prefix : kPrefixes) {
    if (tensor.starts_with(prefix) && base_->find(tensor.substr(prefix.size())) != nullptr) return tensor.substr(prefix.size());
  }
  for (const auto prefix : kPrefixes) {
    if (auto name = std::string(prefix) + tensor; base_->find(name) != nullptr) return name;
  }
  return "";
}

/// The entry of one of the base's tensors, or of one that it lacks.
AppliedAdapter::Change& AppliedAdapter::change_of(const std::string& tensor) {
  auto& change = changes_[tensor];
  if (!change.tensor.empty()) return change;
  change.tensor = tensor;
  change.base = base_->find(tensor);
  if (change.base == nullptr) return change;
  if (!is_floating(change.base->dtype)) {
    fail("{}: tensor \"{}\" is {}, expected F32, BF16, F16 or F64 where an adapter acts; take the base in one of these",
         base_->file_of(tensor), one_line(tensor), io::dtype_name(change.base->dtype));
  }
  change.shape = change.base->shape;
  change.dtype = change.base->dtype;
  change.wide = change.dtype == io::DType::kF64;
  return change;
}

void AppliedAdapter::pair_whole_tensors() {
  for (const auto& [name, tensor] : adapter_->replaced()) {
    const auto in_base = base_name(name);
    auto& change = change_of(in_base.empty() ? name : in_base);
    if (change.base == nullptr) change.dtype = tensor->dtype;
    change.replaced = tensor;
    change.shape = tensor->shape;
    change.wide |= tensor->dtype == io::DType::kF64;
    change.description = "from the adapter";
  }
}

void AppliedAdapter::pair_modules() {
  const auto file = adapter_->weights_file().string();
  const bool tied = ties_embedding(*base_);
  for (const auto& module : adapter_->modules()) {
    auto name = base_name(module.name + ".weight");
    // The head of a tied model need not be stored; `untie` decides what becomes of it.
    if (name.empty() && tied && is_head_module(module.name)) name = module.name + ".weight";
    if (name.empty()) {
      std::vector<std::string> names;
      for (const auto* tensor : base_->tensors()) names.push_back(tensor->name);
      const auto suggestion = did_you_mean(module.name + ".weight", names);
      fail("{}: module \"{}\": {} has no tensor \"{}.weight\"{}", file, one_line(module.name), base_->path().string(),
           one_line(module.name), suggestion.empty() ? "; the adapter belongs to another base" : suggestion);
    }
    auto& change = change_of(name);
    if (change.base == nullptr) {
      for (const auto* tensor : base_->tensors()) {
        if (!tensor->name.ends_with(".weight") || !is_embedding_module(module_of(tensor->name))) continue;
        change.base = tensor;
        if (change.replaced == nullptr) change.shape = tensor->shape;
        change.dtype = tensor->dtype;
        break;
      }
      if (change.base == nullptr) {
        fail("{}: module \"{}\": {} stores neither it nor an embedding that it is tied to; the adapter belongs to another base",
             file, one_line(module.name), base_->path().string());
      }
    }
    if (change.module != nullptr) {
      fail("{}: modules \"{}\" and \"{}\" are both \"{}\" of {}; save the adapter again", file, one_line(change.module->name),
           one_line(module.name), one_line(name), base_->path().string());
    }
    const auto& weight = change.replaced != nullptr ? *change.replaced : *change.base;
    change.module = &module;
    change.transposed = is_stored_transposed(module, weight);
    change.wide |= module.a->dtype == io::DType::kF64 || module.b->dtype == io::DType::kF64;
    change.description += fmt::format("{}{}, rank {}, scaling {:g}", change.replaced != nullptr ? ", " : "",
                                      module.magnitude != nullptr ? "DoRA" : "LoRA", module.rank(), module.scaling);
    if (module.bias == nullptr) continue;

    const auto bias_name = std::string(module_of(name)) + ".bias";
    if (base_->find(bias_name) == nullptr && is_zero(*module.bias)) continue;
    auto& bias = change_of(bias_name);
    if (bias.base == nullptr && bias.replaced == nullptr) {
      fail("{}: module \"{}\" has a bias of B (lora_bias), but {} has no \"{}\" to add it to; the adapter belongs to another "
           "base", file, one_line(module.name), base_->path().string(), one_line(bias_name));
    }
    if (bias.shape != std::vector{module.num_outputs()}) {
      fail("{}: module \"{}\" has a bias of {} values, but \"{}\" of {} is {}; the adapter belongs to another base", file,
           one_line(module.name), module.num_outputs(), one_line(bias_name), base_->path().string(), io::shape_text(bias.shape));
    }
    bias.module = &module;
    bias.is_bias = true;
    bias.wide |= module.bias->dtype == io::DType::kF64;
    bias.description += fmt::format("{}bias of B, scaling {:g}", bias.replaced != nullptr ? ", " : "", module.scaling);
  }
}

bool AppliedAdapter::is_stored_transposed(const io::LoraModule& module, const io::TensorView& weight) const {
  const std::vector straight{module.num_outputs(), module.num_inputs()}, transposed{module.num_inputs(), module.num_outputs()};
  const bool may_be_straight = weight.shape == straight && !module.is_embedding;
  const bool may_be_transposed = weight.shape == transposed;
  if (!may_be_straight && !may_be_transposed) {
    fail("{}: module \"{}\": A is {} and B is {}, which does not fit \"{}\" {} of {}; the adapter belongs to another base{}",
         adapter_->weights_file().string(), one_line(module.name), io::shape_text(module.a->shape),
         io::shape_text(module.b->shape), one_line(weight.name), io::shape_text(weight.shape), base_->path().string(),
         module.is_embedding ? " (or its vocabulary was resized)" : "");
  }
  if (may_be_straight != may_be_transposed) return may_be_transposed;
  const auto family = base_->config().find("model_type");
  if (family != base_->config().end() && family->is_string() &&
      is_one_of(kConv1dFamilies, family->get_ref<const std::string&>())) {
    return is_one_of(kConv1dModules, last_part(module.name));
  }
  return adapter_->fan_in_fan_out();
}

void AppliedAdapter::untie(TiedWeights tied) {
  Change *embedding = nullptr, *head = nullptr;
  for (auto& [name, change] : changes_) {
    if (!name.ends_with(".weight") || (change.module == nullptr && change.replaced == nullptr)) continue;
    if (is_embedding_module(module_of(name))) embedding = &change;
    if (is_head_module(module_of(name))) head = &change;
  }
  const auto erase_head = [&] {
    if (head != nullptr && base_->find(head->tensor) == nullptr) changes_.erase(head->tensor);
  };
  if (embedding == nullptr && head == nullptr) return;
  // Both uses got the same: one tensor, as before.
  if (embedding != nullptr && adapter_->ensures_weight_tying()) return erase_head();
  if (embedding != nullptr && head != nullptr && embedding->module == nullptr && head->module == nullptr &&
      embedding->replaced->dtype == head->replaced->dtype && embedding->shape == head->shape &&
      std::ranges::equal(embedding->replaced->bytes, head->replaced->bytes)) {
    return erase_head();
  }
  const auto& touched = embedding != nullptr ? embedding->tensor : head->tensor;
  if (tied == TiedWeights::kRefuse) {
    fail("{}: acts on \"{}\", which in {} is embedding and head at once (tie_word_embeddings); untie them, so that both tensors "
         "are written and the adapter acts on one", adapter_->weights_file().string(), one_line(touched),
         base_->path().string());
  }
  unties_ = true;
  if (head != nullptr) return;
  // The head stays what it was: the embedding without the adapter.
  const auto family = base_->config().find("model_type");
  const std::string name = family != base_->config().end() && *family == "gpt_neox" ? "embed_out.weight" : "lm_head.weight";
  if (base_->find(name) != nullptr) return;
  const auto architectures = base_->config().find("architectures");
  if (architectures != base_->config().end() && architectures->is_array() &&
      std::ranges::any_of(*architectures, [](const io::Json& a) { return a.is_string() && a.get<std::string>().ends_with("MaskedLM"); })) {
    fail("{}: acts on \"{}\", which in {} is embedding and head at once, and what its masked language model calls a head of its own "
         "is not known here; save the adapter with both (modules_to_save)", adapter_->weights_file().string(), one_line(touched),
         base_->path().string());
  }
  if (embedding->shape != embedding->base->shape) {
    fail("{}: \"{}\" is {}, but {} in {}, whose head it is (tie_word_embeddings), and there is no head of that size; save the "
         "adapter with both (modules_to_save)", adapter_->weights_file().string(), one_line(touched),
         io::shape_text(embedding->shape), io::shape_text(embedding->base->shape), base_->path().string());
  }
  auto& copy = changes_[name];
  copy.tensor = name;
  copy.base = embedding->base;
  copy.shape = embedding->base->shape;
  copy.dtype = embedding->base->dtype;
  copy.wide = copy.dtype == io::DType::kF64;
  copy.description = fmt::format("\"{}\" without the adapter, untied", embedding->tensor);
}

const AppliedAdapter::Change* AppliedAdapter::find(std::string_view tensor) const {
  const auto found = changes_.find(tensor);
  return found == changes_.end() ? nullptr : &found->second;
}

std::unique_ptr<Source> AppliedAdapter::source(std::string_view tensor) const {
  const auto* change = find(tensor);
  const auto* stored = change == nullptr ? base_->find(tensor) : change->replaced != nullptr ? change->replaced : change->base;
  if (stored == nullptr) throw std::logic_error("no tensor \"" + std::string(tensor) + "\"");
  if (change == nullptr || change->module == nullptr) return std::make_unique<StoredTensor>(*stored);
  if (change->is_bias) return std::make_unique<BiasSource>(*stored, *change->module);
  return std::make_unique<LowRankSource>(*stored, *change->module, change->transposed);
}

}  // namespace mergex::merging
