#include "merging/driver.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "core/random.h"
#include "merging/source.h"

namespace mergex::merging {
namespace {

constexpr std::int64_t kTile = 16'384, kUnit = 262'144;
constexpr std::size_t kManySums = 8'192;  // of which no tensor keeps more than kFewUnits times as many
constexpr std::int64_t kFewUnits = 64;
constexpr std::size_t kWriteBytes = std::size_t{1} << 20;
constexpr std::uint64_t kGroupBytes = std::uint64_t{128} << 20;  // of inputs, unless one tensor has more
constexpr std::size_t kGroupTensors = 4'096;
constexpr std::uint64_t kCopyBytes = std::uint64_t{4} << 20;

std::int64_t round_up(std::int64_t count, std::int64_t step) { return (count + step - 1) / step * step; }

/// Values of a source: those of the mapped file where they are of type T, otherwise widened into `room`.
template <class T>
const T* values_of(const Source& source, std::int64_t begin, std::int64_t count, T* room) {
  constexpr auto kStored = sizeof(T) == sizeof(float) ? io::DType::kF32 : io::DType::kF64;
  if (const auto* view = source.stored(); view != nullptr && view->dtype == kStored) {
    const auto* address = view->bytes.data() + begin * static_cast<std::int64_t>(sizeof(T));
    if (reinterpret_cast<std::uintptr_t>(address) % alignof(T) == 0) return reinterpret_cast<const T*>(address);
  }
  source.read(begin, count, room);
  return room;
}

std::uint64_t input_bytes(const PlannedTensor& tensor) {
  if (tensor.method == nullptr) return tensor.num_bytes();
  std::uint64_t total = 0;
  const auto add = [&](const PlannedTensor::Origin& origin) {
    const auto* view = origin.source->stored();
    total += view != nullptr ? view->bytes.size()
                             : static_cast<std::uint64_t>(tensor.context.num_elements()) * sizeof(float);
  };
  if (tensor.base) add(*tensor.base);
  for (const auto& input : tensor.inputs) add(input);
  return total;
}

}  // namespace

Division divide(const TensorContext& context, bool whole_rows, std::size_t num_sums) {
  const auto total = context.num_elements();
  const auto row = whole_rows ? std::max<std::int64_t>(1, context.row_length()) : 1;
  Division division;
  division.tile = std::max(row, kTile / row * row);
  division.unit = std::max(division.tile, kUnit / division.tile * division.tile);
  if (num_sums > kManySums)
    division.unit = std::max(division.unit, round_up((total + kFewUnits - 1) / kFewUnits, division.tile));
  division.num_units = (total + division.unit - 1) / division.unit;
  return division;
}

std::vector<Piece> sample_of(std::int64_t num_elements, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kPiece = 64, kLeast = 32'768, kPerSampled = 512;
  const auto num_sampled = std::max(kLeast, num_elements / kPerSampled);
  const auto pieces_per_part = std::max<std::int64_t>(1, num_elements / num_sampled);
  const auto part = kPiece * pieces_per_part;
  std::vector<Piece> pieces;
  for (auto p = begin / part; p * part < end; ++p) {
    const auto drawn = SplitMix64(static_cast<std::uint64_t>(p)).next() % static_cast<std::uint64_t>(pieces_per_part);
    const auto first = p * part + kPiece * static_cast<std::int64_t>(drawn);
    // A piece belongs to the range that it begins in.
    if (first >= begin && first < end) pieces.push_back({.begin = first, .count = std::min(kPiece, end - first)});
  }
  return pieces;
}

/// What one thread works with.
class Driver::Buffers {
 public:
  struct Sizes {
    std::size_t values = 0;  // bytes of a tile's inputs, result and scratch
    std::size_t counts = 0, state = 0, written = 0;

    std::uint64_t num_bytes() const {
      return values + counts * sizeof(std::uint32_t) + state * sizeof(std::int64_t) + written;
    }
    void enlarge(const Sizes& other) {
      values = std::max(values, other.values);
      counts = std::max(counts, other.counts);
      state = std::max(state, other.state);
      written = std::max(written, other.written);
    }
  };

  void resize(const Sizes& sizes) {
    lines_.resize((sizes.values + sizeof(Line) - 1) / sizeof(Line));
    state.resize(sizes.state);
    written.resize(sizes.written);
    counted_ = nullptr;
  }

  /// Room for `number` arrays of `length` values, each on a cache line of its own.
  template <class T>
  std::vector<T*> arrays(std::size_t number, std::int64_t length) {
    std::vector<T*> all(number);
    auto* next = reinterpret_cast<std::byte*>(lines_.data());
    for (auto& array : all) {
      array = reinterpret_cast<T*>(next);
      next += array_bytes<T>(length);
    }
    return all;
  }
  template <class T>
  static std::size_t array_bytes(std::int64_t length) {
    return static_cast<std::size_t>(round_up(length * static_cast<std::int64_t>(sizeof(T)), sizeof(Line)));
  }

  /// Counts of this thread for a tensor. Those of the tensor before are added to its totals.
  std::span<std::uint32_t> counts_for(Run& run, std::size_t size, std::int64_t num_elements);
  void leave_counts();

  std::vector<std::int64_t> state;
  std::vector<std::byte> written;

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };

  std::vector<Line> lines_;
  std::vector<std::uint32_t> counts_;
  Run* counted_ = nullptr;
  std::int64_t num_counted_ = 0;  // elements: a count must not overflow
};

/// One tensor on its way through the passes.
class Driver::Run {
 public:
  Run(std::size_t tensor_index, const PlannedTensor& planned) : index(tensor_index), tensor(planned) {}
  virtual ~Run() = default;
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  virtual int passes() const { return 0; }
  virtual bool wants(int /*pass*/) const { return false; }
  virtual std::int64_t num_units() const = 0;
  virtual std::uint64_t unit_bytes(std::int64_t unit) const = 0;  // of the result
  virtual Buffers::Sizes buffer_sizes() const { return {}; }
  virtual std::uint64_t kept_bytes() const { return 0; }  // from the beginning of a pass to its end
  /// A pass, or nothing: the result.
  virtual void begin(std::optional<int> /*pass*/) {}
  virtual void work(std::optional<int> pass, std::int64_t unit, Buffers& buffers) = 0;
  virtual void add_counts(std::span<const std::uint32_t> /*counts*/) {}
  virtual void finish(int /*pass*/) {}
  virtual MergedTensor merged() const { return {}; }

  const std::size_t index;
  const PlannedTensor& tensor;
  bool has_model_state = false;  // its passes are those of the whole model
};

std::span<std::uint32_t> Driver::Buffers::counts_for(Run& run, std::size_t size, std::int64_t num_elements) {
  if (size == 0) return {};
  if (counted_ != &run || num_counted_ + num_elements > std::int64_t{UINT32_MAX}) {
    leave_counts();
    counts_.assign(size, 0);
    counted_ = &run;
    num_counted_ = 0;
  }
  num_counted_ += num_elements;
  return counts_;
}

void Driver::Buffers::leave_counts() {
  if (counted_ != nullptr) std::exchange(counted_, nullptr)->add_counts(counts_);
}

class Driver::CopyRun final : public Run {
 public:
  CopyRun(std::size_t tensor_index, const PlannedTensor& planned, const MergePlan& plan, const ShardFiles& files)
      : Run(tensor_index, planned), files_(files), bytes_(planned.copied->source->stored()->bytes) {
    const auto& folder = *plan.models[planned.copied->model].folder;
    path_ = folder.file_of(planned.copied->tensor);
    offset_ = folder.offset_of(planned.copied->tensor);
  }

  std::int64_t num_units() const override {
    return static_cast<std::int64_t>((bytes_.size() + kCopyBytes - 1) / kCopyBytes);
  }
  std::uint64_t unit_bytes(std::int64_t unit) const override { return part(unit).size(); }

  void work(std::optional<int>, std::int64_t unit, Buffers&) override {
    const auto from = static_cast<std::uint64_t>(unit) * kCopyBytes;
    files_.copy(index, from, io::FileDescriptor(path_, O_RDONLY), offset_ + from, part(unit));
  }

 private:
  std::span<const std::byte> part(std::int64_t unit) const {
    const auto from = static_cast<std::size_t>(unit) * kCopyBytes;
    return bytes_.subspan(from, std::min<std::size_t>(kCopyBytes, bytes_.size() - from));
  }

  const ShardFiles& files_;
  std::span<const std::byte> bytes_;
  std::string path_;
  std::uint64_t offset_ = 0;
};

template <class T>
class Driver::MergeRun final : public Run {
 public:
  MergeRun(std::size_t tensor_index, const PlannedTensor& planned, const ShardFiles& files,
           std::unique_ptr<TensorMerge<T>> merge)
      : Run(tensor_index, planned),
        files_(files),
        merge_(std::move(merge)),
        needs_(merge_->needs()),
        division_(divide(planned.context, needs_.whole_rows, needs_.sums)),
        num_elements_(planned.context.num_elements()),
        element_bytes_(io::dtype_size(planned.dtype)) {}

  int passes() const override { return needs_.passes; }
  bool wants(int pass) const override { return pass < needs_.passes && merge_->wants(pass); }
  std::int64_t num_units() const override { return division_.num_units; }
  std::uint64_t unit_bytes(std::int64_t unit) const override {
    return static_cast<std::uint64_t>(end_of(unit) - unit * division_.unit) * element_bytes_;
  }

  Buffers::Sizes buffer_sizes() const override {
    return {.values = num_arrays() * Buffers::array_bytes<T>(tile()) +
                      needs_.scratch * static_cast<std::size_t>(tile()) * sizeof(T),
            .counts = needs_.counts,
            .state = needs_.state,
            .written = std::max(kWriteBytes, static_cast<std::size_t>(tile()) * element_bytes_)};
  }
  std::uint64_t kept_bytes() const override {
    const auto units = static_cast<std::uint64_t>(division_.num_units);
    return units * (needs_.lists * needs_.listed * sizeof(std::uint64_t) + needs_.sums * sizeof(double) +
                    sizeof(Comparison) + tensor.inputs.size() * sizeof(Comparison::Input)) +
           needs_.counts * sizeof(std::uint64_t);
  }

  void begin(std::optional<int> pass) override {
    const auto units = static_cast<std::size_t>(division_.num_units);
    if (pass) {
      unit_sums_.assign(units * needs_.sums, 0.0);
      unit_lists_.assign(units * needs_.lists, {});
      counts_.assign(has_counts(*pass) ? needs_.counts : 0, 0);
    } else {
      comparisons_.assign(units, Comparison(tensor.inputs.size()));
    }
  }

  void work(std::optional<int> pass, std::int64_t unit, Buffers& buffers) override {
    const auto unit_begin = unit * division_.unit, unit_end = end_of(unit);
    const auto arrays = buffers.arrays<T>(num_arrays() + 1, tile());  // the last one is scratch, as long as it needs
    T* const result = arrays[num_arrays() - 1];
    Workspace<T> workspace;
    if (pass) {
      workspace.sums = std::span(unit_sums_).subspan(static_cast<std::size_t>(unit) * needs_.sums, needs_.sums);
      workspace.lists = std::span(unit_lists_).subspan(static_cast<std::size_t>(unit) * needs_.lists, needs_.lists);
      if (has_counts(*pass)) workspace.counts = buffers.counts_for(*this, needs_.counts, unit_end - unit_begin);
    }
    workspace.state = std::span(buffers.state).first(needs_.state);
    std::ranges::fill(workspace.state, 0);

    std::vector<const T*> inputs(tensor.inputs.size());
    std::size_t filled = 0;  // bytes of the result that wait to be written
    const bool is_sample = needs_.samples_first && pass == 0;
    for (const auto [begin, count] :
         is_sample ? sample_of(num_elements_, unit_begin, unit_end) : tiles_of(unit_begin, unit_end)) {
      for (std::size_t i = 0; i < inputs.size(); ++i)
        inputs[i] = values_of(*tensor.inputs[i].source, begin, count, arrays[i]);
      const T* base = tensor.base ? values_of(*tensor.base->source, begin, count, arrays[inputs.size()]) : nullptr;
      const Tile<T> tile_of_inputs{.begin = begin,
                                   .count = count,
                                   .unit = unit,
                                   .opens_unit = begin == unit_begin,
                                   .base = base,
                                   .inputs = inputs};
      workspace.scratch = {arrays.back(), needs_.scratch * static_cast<std::size_t>(count)};
      if (pass) {
        merge_->gather(*pass, tile_of_inputs, workspace);
        continue;
      }
      merge_->merge(tile_of_inputs, workspace, result);
      auto& comparison = comparisons_[static_cast<std::size_t>(unit)];
      comparison.add<T>(count, base, inputs, result);

      const auto size = static_cast<std::size_t>(count) * element_bytes_;
      if (filled + size > buffers.written.size()) write(begin, std::exchange(filled, 0), buffers);
      comparison.num_not_finite += narrow_values(tensor.dtype, count, result, buffers.written.data() + filled);
      filled += size;
    }
    write(unit_end, filled, buffers);
  }

  void add_counts(std::span<const std::uint32_t> counts) override {
    const std::lock_guard lock(counts_mutex_);
    for (std::size_t i = 0; i < counts.size(); ++i) counts_[i] += counts[i];
  }

  void finish(int pass) override {
    std::vector<double> sums(needs_.sums);
    for (std::size_t begin = 0; begin < unit_sums_.size(); begin += needs_.sums) {
      for (std::size_t i = 0; i < needs_.sums; ++i) sums[i] += unit_sums_[begin + i];
    }
    merge_->finish(pass, {.sums = sums, .unit_sums = unit_sums_, .counts = counts_, .unit_lists = unit_lists_});
    unit_sums_ = {};
    unit_lists_ = {};
    counts_ = {};
  }

  MergedTensor merged() const override {
    MergedTensor merged;
    merged.comparison.emplace(tensor.inputs.size());
    for (const auto& comparison : comparisons_) *merged.comparison += comparison;
    merge_->report(merged.findings);
    return merged;
  }

 private:
  std::int64_t tile() const { return std::min(division_.tile, num_elements_); }
  std::int64_t end_of(std::int64_t unit) const { return std::min(num_elements_, (unit + 1) * division_.unit); }
  std::size_t num_arrays() const { return tensor.inputs.size() + (tensor.base ? 2 : 1); }  // with the result

  bool has_counts(int pass) const { return pass >= (needs_.samples_first ? 2 : 0); }
  std::vector<Piece> tiles_of(std::int64_t begin, std::int64_t end) const {
    std::vector<Piece> tiles;
    for (; begin < end; begin += tile()) tiles.push_back({.begin = begin, .count = std::min(tile(), end - begin)});
    return tiles;
  }

  /// The last `size` bytes before element `end`.
  void write(std::int64_t end, std::size_t size, const Buffers& buffers) const {
    if (size == 0) return;
    files_.write(index, static_cast<std::uint64_t>(end) * element_bytes_ - size,
                 std::span(buffers.written).first(size));
  }

  const ShardFiles& files_;
  std::unique_ptr<TensorMerge<T>> merge_;
  typename TensorMerge<T>::Needs needs_;
  Division division_;
  std::int64_t num_elements_;
  std::size_t element_bytes_;
  std::vector<double> unit_sums_;  // [units, sums]
  std::vector<std::vector<std::uint64_t>> unit_lists_;  // [units, lists]
  std::mutex counts_mutex_;
  std::vector<std::uint64_t> counts_;
  std::vector<Comparison> comparisons_;  // by unit
};

Driver::Driver(const MergePlan& plan, ThreadPool& pool, const ShardFiles& files, std::uint64_t memory_bytes,
               std::function<void(std::uint64_t, const PlannedTensor&)> progress)
    : plan_(plan),
      pool_(pool),
      files_(files),
      memory_bytes_(memory_bytes),
      progress_(std::move(progress)),
      runs_(plan.tensors.size()),
      buffers_(pool.num_threads()) {}

Driver::~Driver() = default;

Driver::Run& Driver::run_of(std::size_t index) {
  auto& run = runs_[index];
  if (run != nullptr) return *run;
  const auto& tensor = plan_.tensors[index];
  if (tensor.method == nullptr) {
    run = std::make_unique<CopyRun>(index, tensor, plan_, files_);
    return *run;
  }
  auto* const state = model_state_of(tensor);
  if (tensor.wide) {
    run = std::make_unique<MergeRun<double>>(index, tensor, files_, tensor.method->make_double(tensor.context, state));
  } else {
    run = std::make_unique<MergeRun<float>>(index, tensor, files_, tensor.method->make_float(tensor.context, state));
  }
  run->has_model_state = state != nullptr;
  return *run;
}

ModelState* Driver::model_state_of(const PlannedTensor& tensor) {
  if (tensor.method == nullptr || tensor.method->model_state == nullptr) return nullptr;
  auto found = std::ranges::find(states_, tensor.method, &decltype(states_)::value_type::first);
  if (found == states_.end())
    found = states_.insert(found, {tensor.method, tensor.method->model_state(tensor.context)});
  return found->second.get();
}

void Driver::gather_model() {
  std::vector<std::size_t> tensors;
  int num_passes = 0;
  for (std::size_t i = 0; i < plan_.tensors.size(); ++i) {
    if (model_state_of(plan_.tensors[i]) == nullptr) continue;
    tensors.push_back(i);
    num_passes = std::max(num_passes, run_of(i).passes());
  }
  for (int pass = 0; pass < num_passes; ++pass) {
    for (std::span<const std::size_t> pending = tensors; !pending.empty();) {
      const auto group = pending.first(group_size(pending));
      pending = pending.subspan(group.size());
      std::vector<Run*> runs;
      for (const auto i : group) runs.push_back(runs_[i].get());
      run_pass(runs, pass);
    }
    for (const auto& [method, state] : states_) {
      if (state != nullptr) state->finish(pass);
    }
  }
}

std::size_t Driver::group_size(std::span<const std::size_t> pending) {
  std::uint64_t bytes = 0, kept = 0;
  for (std::size_t size = 0; size < pending.size(); ++size) {
    const auto& run = run_of(pending[size]);
    bytes += input_bytes(run.tensor);
    kept += run.kept_bytes();
    if (size > 0 && (size == kGroupTensors || bytes > kGroupBytes || kept > memory_bytes_ / 4)) return size;
  }
  return pending.size();
}

std::vector<MergedTensor> Driver::merge(std::span<const std::size_t> group) {
  std::vector<Run*> runs, gathering;
  int num_passes = 0;
  for (const auto index : group) {
    runs.push_back(&run_of(index));
    if (runs.back()->has_model_state) continue;
    gathering.push_back(runs.back());
    num_passes = std::max(num_passes, runs.back()->passes());
  }
  for (int pass = 0; pass < num_passes; ++pass) run_pass(gathering, pass);
  run_pass(runs, std::nullopt);

  std::vector<MergedTensor> merged;
  for (const auto index : group) {
    merged.push_back(runs_[index]->merged());
    runs_[index].reset();
  }
  return merged;
}

void Driver::run_pass(std::span<Run* const> all, std::optional<int> pass) {
  // Bytes of the result are told in equal parts, one per pass.
  const auto part = [&](const Run& run, std::uint64_t bytes) {
    const auto equal = bytes / (static_cast<std::uint64_t>(run.passes()) + 1);
    return pass ? equal : bytes - equal * static_cast<std::uint64_t>(run.passes());
  };
  struct Item {
    Run* run;
    std::int64_t unit;
  };
  std::vector<Run*> runs;
  std::vector<Item> items;
  Buffers::Sizes sizes;
  std::uint64_t kept = 0;
  for (auto* run : all) {
    if (pass && !run->wants(*pass)) {
      if (*pass < run->passes()) {
        for (std::int64_t unit = 0; unit < run->num_units(); ++unit)
          progress_(part(*run, run->unit_bytes(unit)), run->tensor);
      }
      continue;
    }
    runs.push_back(run);
    run->begin(pass);
    for (std::int64_t unit = 0; unit < run->num_units(); ++unit) items.push_back({run, unit});
    sizes.enlarge(run->buffer_sizes());
    kept += run->kept_bytes();
  }
  if (const auto needed = kept + sizes.num_bytes(); needed > memory_bytes_) {
    fail("\"{}\": merging it takes {} of memory at once, --memory allows {}; raise it", all.front()->tensor.name,
         bytes_text(needed), bytes_text(memory_bytes_));
  }
  const auto num_threads = std::clamp<std::uint64_t>(memory_bytes_ / 4 / std::max<std::uint64_t>(1, sizes.num_bytes()),
                                                     1, pool_.num_threads());
  for (std::size_t thread = 0; thread < num_threads; ++thread) buffers_[thread].resize(sizes);

  pool_.parallel_for(
      items.size(),
      [&](std::size_t i, std::size_t thread) {
        const auto [run, unit] = items[i];
        run->work(pass, unit, buffers_[thread]);
        progress_(part(*run, run->unit_bytes(unit)), run->tensor);
      },
      num_threads);
  for (std::size_t thread = 0; thread < num_threads; ++thread) buffers_[thread].leave_counts();
  if (!pass) return;
  if (runs.empty() || runs.front()->has_model_state) {
    for (auto* run : runs) run->finish(*pass);  // in their order, for what a model's tensors share
  } else {
    pool_.parallel_for(runs.size(), [&](std::size_t i, std::size_t) { runs[i]->finish(*pass); });
  }
}

}  // namespace mergex::merging
