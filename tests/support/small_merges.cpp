#include "support/small_merges.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "merging/source.h"

namespace mergex::test {
namespace fs = std::filesystem;
using io::DType;
using merging::MergePlan;
using merging::Method;
using merging::PlannedTensor;
using merging::TensorContext;
using merging::TensorMerge;
using merging::Tile;
using merging::Totals;
using merging::Workspace;

namespace {

template <class T>
class Mean final : public TensorMerge<T> {
 public:
  void merge(const Tile<T>& tile, const Workspace<T>&, T* out) const override {
    for (std::int64_t i = 0; i < tile.count; ++i) {
      T sum = tile.base != nullptr ? tile.base[i] : T{0};
      for (const T* input : tile.inputs) sum += input[i];
      out[i] = sum / static_cast<T>(tile.inputs.size() + (tile.base != nullptr ? 1 : 0));
    }
  }
  void report(io::Json& entry) const override { entry["is_mean"] = true; }
};

template <class T>
class Centered final : public TensorMerge<T> {
 public:
  explicit Centered(const TensorContext& context) : num_elements_(context.num_elements()) {}

  // As many counts as a histogram has, so that what a group may keep is reached with small tensors.
  typename TensorMerge<T>::Needs needs() const override {
    return {.passes = 3, .sums = 1, .counts = 65'536, .state = 1, .scratch = 1};
  }
  bool wants(int pass) const override { return pass != 1; }
  void gather(int pass, const Tile<T>& tile, const Workspace<T>& workspace) const override {
    if (pass == 1) throw std::logic_error("nobody wants this pass");
    if ((workspace.state[0] == 0) != tile.opens_unit) throw std::logic_error("state is not the unit's");
    workspace.state[0] += tile.count;
    std::copy_n(tile.inputs[0], tile.count, workspace.scratch.data());
    for (const T value : workspace.scratch) {
      if (pass == 0) workspace.sums[0] += static_cast<double>(value);
      if (pass == 2 && value > T{0}) ++workspace.counts[65'535];
    }
  }
  void finish(int pass, const Totals& totals) override {
    const auto count = static_cast<double>(std::max<std::int64_t>(1, num_elements_));
    if (pass == 0) mean_ = totals.sums[0] / count;
    if (pass == 2) positive_ = static_cast<double>(totals.counts[65'535]) / count;
  }
  void merge(const Tile<T>& tile, const Workspace<T>&, T* out) const override {
    for (std::int64_t i = 0; i < tile.count; ++i)
      out[i] = tile.inputs[0][i] - static_cast<T>(mean_) + static_cast<T>(positive_);
  }
  void report(io::Json& entry) const override { entry["positive"] = positive_; }

 private:
  std::int64_t num_elements_;
  double mean_ = 0.0, positive_ = 0.0;
};

template <class T>
class RowScaled final : public TensorMerge<T> {
 public:
  explicit RowScaled(const TensorContext& context) : row_(context.row_length()) {}

  typename TensorMerge<T>::Needs needs() const override { return {.whole_rows = true}; }
  void merge(const Tile<T>& tile, const Workspace<T>&, T* out) const override {
    if (tile.count % row_ != 0) throw std::logic_error("a tile ends inside of a row");
    for (std::int64_t begin = 0; begin < tile.count; begin += row_) {
      double sum = 0.0;
      for (std::int64_t i = begin; i < begin + row_; ++i) sum += std::abs(static_cast<double>(tile.inputs[0][i]));
      for (std::int64_t i = begin; i < begin + row_; ++i)
        out[i] = tile.inputs[0][i] / static_cast<T>(sum / static_cast<double>(row_));
    }
  }

 private:
  std::int64_t row_;
};

struct ModelNorm final : merging::ModelState {
  void finish(int) override { norm = std::sqrt(square); }
  double square = 0.0, norm = 0.0;
};

template <class T>
class Global final : public TensorMerge<T> {
 public:
  explicit Global(merging::ModelState* state) : model_(static_cast<ModelNorm&>(*state)) {}

  typename TensorMerge<T>::Needs needs() const override { return {.passes = 1, .sums = 1}; }
  void gather(int, const Tile<T>& tile, const Workspace<T>& workspace) const override {
    for (std::int64_t i = 0; i < tile.count; ++i)
      workspace.sums[0] += static_cast<double>(tile.inputs[0][i]) * static_cast<double>(tile.inputs[0][i]);
  }
  void finish(int, const Totals& totals) override { model_.square += totals.sums[0]; }
  void merge(const Tile<T>& tile, const Workspace<T>&, T* out) const override {
    for (std::int64_t i = 0; i < tile.count; ++i) out[i] = tile.inputs[0][i] / static_cast<T>(model_.norm);
  }

 private:
  ModelNorm& model_;
};

template <template <class> class Merge, class T>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, merging::ModelState* state) {
  if constexpr (std::is_constructible_v<Merge<T>, const TensorContext&>) {
    return std::make_unique<Merge<T>>(context);
  } else if constexpr (std::is_constructible_v<Merge<T>, merging::ModelState*>) {
    return std::make_unique<Merge<T>>(state);
  } else {
    return std::make_unique<Merge<T>>();
  }
}

template <template <class> class Merge>
constexpr Method method(std::string_view name) {
  return {.name = name,
          .summary = "for tests",
          .paper = "none",
          .make_float = make<Merge, float>,
          .make_double = make<Merge, double>};
}

std::vector<MadeTensor> tensors_of(const SmallMerge& merge, std::uint64_t seed) {
  std::vector<MadeTensor> tensors{{"long.f32", {merge.long_tensor}, DType::kF32, seed},
                                  {"ids.i64", {11}, DType::kI64, 1},
                                  {"matrix.bf16", {70, 641}, DType::kBF16, seed},
                                  {"matrix.f16", {300, 65}, DType::kF16, seed},
                                  {"scalar.f32", {}, DType::kF32, seed},
                                  {"wide.f64", {33, 7}, DType::kF64, seed},
                                  {"empty.f32", {0, 4}, DType::kF32, seed},
                                  {"copied.bf16", {999}, DType::kBF16, seed}};
  for (int i = 0; i < merge.num_small; ++i)
    tensors.push_back({"small." + std::to_string(i), {3, 5 + i}, i % 2 == 0 ? DType::kF32 : DType::kBF16, seed});
  return tensors;
}

}  // namespace

constinit const Method kMean = method<Mean>("mean");
constinit const Method kCentered = method<Centered>("centered");
constinit const Method kRowScaled = method<RowScaled>("row_scaled");
constinit const Method kGlobal = [] {
  auto global = method<Global>("global");
  global.model_state = [](const TensorContext&) -> std::shared_ptr<merging::ModelState> {
    return std::make_shared<ModelNorm>();
  };
  return global;
}();

void SmallMerge::make_inputs() const {
  const auto config = io::Json{{"model_type", "made_up"}};
  make_checkpoint(folder / "base", config, tensors_of(*this, 1), input_shards);
  make_checkpoint(folder / "a", config, tensors_of(*this, 2), input_shards);
  make_checkpoint(folder / "b", config, tensors_of(*this, 3), input_shards);
}

MergePlan SmallMerge::plan() const {
  MergePlan plan;
  for (const auto* name : {"base", "a", "b"})
    plan.models.push_back({.name = name, .folder = std::make_shared<const io::CheckpointFolder>(folder / name)});
  plan.donor = folder / "base";
  plan.written_files.emplace_back("config.json", "{\"model_type\": \"made_up\"}\n");
  plan.written_files.emplace_back("1_Pooling/config.json", "{}\n");
  plan.resolved = io::Json{{"name", "small"}, {"seed", 7}};
  int number = 0;
  for (const auto& made : tensors_of(*this, 1)) {
    PlannedTensor tensor{
        .name = made.name, .dtype = made.dtype, .shape = made.shape, .wide = made.dtype == DType::kF64};
    const auto origin = [&](std::size_t model) -> PlannedTensor::Origin {
      const auto* view = plan.models[model].folder->find(made.name);
      plan.sources.push_back(std::make_unique<merging::StoredTensor>(*view));
      return {.model = model, .tensor = made.name, .source = plan.sources.back().get()};
    };
    tensor.context = {.name = made.name, .shape = made.shape};
    if (made.dtype == DType::kI64 || made.name == "copied.bf16") {
      tensor.copied = origin(1);
    } else {
      constexpr const Method* kAll[] = {&kMean, &kCentered, &kRowScaled, &kGlobal};
      tensor.method = made.name == "wide.f64" ? &kMean : made.name == "long.f32" ? &kCentered : kAll[number++ % 4];
      if (tensor.method == &kMean) tensor.base = origin(0);
      tensor.context.has_base = tensor.base.has_value();
      for (std::size_t model = 1; model <= 2; ++model) {
        tensor.inputs.push_back(origin(model));
        tensor.context.inputs.push_back({.identity = std::to_string(model)});
      }
    }
    plan.tensors.push_back(std::move(tensor));
  }
  return plan;
}

std::vector<double> expected_values(const MergePlan& plan, const PlannedTensor& tensor) {
  const auto values = [&](std::size_t model, const std::string& name) {
    return values_of(*plan.models[model].folder->find(name));
  };
  auto a = values(1, tensor.name);
  if (tensor.method == nullptr) return a;
  if (tensor.method == &kMean) {
    const auto base = values(0, tensor.name), b = values(2, tensor.name);
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = (base[i] + a[i] + b[i]) / 3.0;
  } else if (tensor.method == &kCentered) {
    const double mean = std::accumulate(a.begin(), a.end(), 0.0) / static_cast<double>(a.size());
    const double positive =
        static_cast<double>(std::ranges::count_if(a, [](double x) { return x > 0.0; })) / static_cast<double>(a.size());
    for (auto& x : a) x += positive - mean;
  } else if (tensor.method == &kRowScaled) {
    const auto row = static_cast<std::size_t>(tensor.context.row_length());
    for (std::size_t begin = 0; begin < a.size(); begin += row) {
      double sum = 0.0;
      for (std::size_t i = begin; i < begin + row; ++i) sum += std::abs(a[i]);
      for (std::size_t i = begin; i < begin + row; ++i) a[i] /= sum / static_cast<double>(row);
    }
  } else {
    double square = 0.0;
    for (const auto& other : plan.tensors) {
      if (other.method != &kGlobal) continue;
      for (const double x : values(1, other.name)) square += x * x;
    }
    for (auto& x : a) x /= std::sqrt(square);
  }
  return a;
}

std::map<std::string, std::string> comparable_content(const fs::path& folder) {
  std::map<std::string, std::string> content;
  for (auto& [name, bytes] : folder_content(folder)) {
    if (name != "timing.json") content.emplace(name, std::move(bytes));
  }
  return content;
}

}  // namespace mergex::test
