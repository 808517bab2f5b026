#include "merging/task_vectors.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/random.h"
#include "merging/span_kernels.h"

namespace mergex::merging {
namespace {

// Sums of the L1 pass, per input: magnitudes before and after in lanes, values other than 0 before and after.
constexpr std::size_t kL1Sums = 2 * kLanes + 2;

template <class T>
class TaskVectorMerge final : public TensorMerge<T> {
 public:
  using Needs = typename TensorMerge<T>::Needs;

  TaskVectorMerge(const TensorContext& context, const TaskVectorOptions& options,
                  std::unique_ptr<Sparsifier<T>> sparsifier, MajoritySign* majority)
      : num_inputs_(context.inputs.size()),
        options_(options),
        lambda_(static_cast<T>(context.shared["lambda"])),
        factors_(num_inputs_, T{1}),
        ones_(num_inputs_, T{1}),
        l1_floor_(context.dialect == Dialect::kMergekit ? 1e-7 : 0.0),
        sparsifier_(std::move(sparsifier)),
        majority_(majority) {
    for (std::size_t i = 0; i < num_inputs_; ++i) {
      const auto& parameters = context.inputs[i].parameters;
      weights_.push_back(static_cast<T>(parameters["weight"]));
      if (options.rescale == Rescale::kInverseDensity && parameters["density"] > 0.0) {
        factors_[i] = static_cast<T>(1.0 / parameters["density"]);
      }
    }
    const T sum = std::accumulate(weights_.begin(), weights_.end(), T{0});
    if (options.normalize && options.vote == Vote::kNone && std::abs(sum) >= T(1e-8)) divisor_ = sum;
    if (sparsifier_) sparsifier_needs_ = sparsifier_->needs();
    l1_pass_ = sparsifier_needs_.passes;
    majority_pass_ = l1_pass_ + 1;
  }

  Needs needs() const override {
    Needs n = sparsifier_needs_;
    n.passes = majority_pass_ + 1;
    n.sums = std::max(n.sums, kL1Sums * num_inputs_);
    n.scratch = num_inputs_ + 2;
    return n;
  }

  bool wants(int pass) const override {
    if (pass == l1_pass_) return sparsifier_ && options_.rescale == Rescale::kL1;
    if (pass == majority_pass_) return majority_ != nullptr;
    return sparsifier_->wants(pass);
  }

  void gather(int pass, const Tile<T>& tile, const Workspace<T>& workspace) const override {
    const auto& k = span_kernels<T>();
    over_blocks(tile, workspace, [&](std::int64_t begin, std::int64_t count, T* deltas) {
      for (std::size_t i = 0; i < num_inputs_; ++i) {
        T* delta = deltas + static_cast<std::int64_t>(i) * count;
        k.difference(count, tile.inputs[i] + begin, tile.base + begin, delta);
        const auto run = run_of(tile, workspace, i, begin, count);
        if (pass < l1_pass_) {
          sparsifier_->gather(pass, run, delta);
        } else if (pass == l1_pass_) {
          double* sums = workspace.sums.data() + i * kL1Sums;
          const auto first = (tile.begin + begin) % kLanes;
          k.sum_magnitudes(count, first, delta, sums);
          sums[2 * kLanes] += static_cast<double>(k.count_nonzero(count, delta));
          sparsifier_->keep(run, delta);
          k.sum_magnitudes(count, first, delta, sums + kLanes);
          sums[2 * kLanes + 1] += static_cast<double>(k.count_nonzero(count, delta));
        } else {
          prepare(run, delta);
        }
      }
      if (pass == majority_pass_) count_votes(count, deltas, workspace.sums[0]);
    });
  }

  void finish(int pass, const Totals& totals) override {
    if (pass < l1_pass_) return sparsifier_->finish(pass, totals);
    if (pass == majority_pass_) {
      majority_->add(static_cast<std::int64_t>(totals.sums[0]));
      return;
    }
    for (std::size_t i = 0; i < num_inputs_; ++i) {
      const double* sums = totals.sums.data() + i * kL1Sums;
      const double before = std::accumulate(sums, sums + kLanes, 0.0);
      const double after = std::accumulate(sums + kLanes, sums + 2 * kLanes, 0.0);
      if (before > l1_floor_ && after > l1_floor_) factors_[i] = static_cast<T>(before / after);
      kept_.push_back(sums[2 * kLanes] > 0.0 ? sums[2 * kLanes + 1] / sums[2 * kLanes] : 1.0);
    }
  }

  void merge(const Tile<T>& tile, const Workspace<T>& workspace, T* out) const override {
    const auto& k = span_kernels<T>();
    const bool tie_is_negative = majority_ != nullptr && majority_->is_negative();
    over_blocks(tile, workspace, [&](std::int64_t begin, std::int64_t count, T* deltas) {
      const T* base = tile.base + begin;
      T* sum = deltas + static_cast<std::int64_t>(num_inputs_) * count;
      T* shares = sum + count;
      for (std::size_t i = 0; i < num_inputs_; ++i) {
        const auto run = run_of(tile, workspace, i, begin, count);
        T* delta = options_.vote == Vote::kNone && i == 0 ? sum : deltas + static_cast<std::int64_t>(i) * count;
        k.difference(count, tile.inputs[i] + begin, base, delta);
        prepare(run, delta);
        if (options_.vote == Vote::kNone && i > 0) k.add(count, delta, sum);
      }
      if (options_.vote != Vote::kNone) {
        const bool weighted = options_.vote == Vote::kWeighted;
        k.elect(count, static_cast<std::int64_t>(num_inputs_), deltas, count, (weighted ? ones_ : weights_).data(),
                (weighted ? weights_ : ones_).data(), tie_is_negative, sum, shares);
        if (options_.normalize) k.divide_each(count, shares, sum);
      } else if (divisor_ != T{1}) {
        k.divide(count, divisor_, sum);
      }
      if (lambda_ != T{1}) k.scale(count, lambda_, sum);
      k.add(count, base, sum);
      std::copy_n(sum, count, out + begin);
    });
  }

  void report(io::Json& entry) const override {
    if (sparsifier_) sparsifier_->report(entry);
    if (!kept_.empty()) entry["kept"] = kept_;
    if (options_.rescale == Rescale::kL1 || options_.rescale == Rescale::kInverseDensity) entry["rescale"] = factors_;
  }

 private:
  /// Calls body(first element, count, scratch) for blocks of a tile; the offset counts from the tile's begin.
  template <class Body>
  void over_blocks(const Tile<T>& tile, const Workspace<T>& workspace, Body body) const {
    const auto block = sparsifier_needs_.whole_rows ? tile.count : kBlock;
    for (std::int64_t begin = 0; begin < tile.count; begin += block) {
      body(begin, std::min(block, tile.count - begin), workspace.scratch.data());
    }
  }

  Run<T> run_of(const Tile<T>& tile, const Workspace<T>& workspace, std::size_t input, std::int64_t begin,
                std::int64_t count) const {
    return {.input = input,
            .begin = tile.begin + begin,
            .count = count,
            .unit = tile.unit,
            .sums = workspace.sums,
            .counts = workspace.counts,
            .state = workspace.state,
            .lists = workspace.lists};
  }

  /// Drops, rescales and, where weights act before the sum or vote, weights.
  void prepare(const Run<T>& run, T* delta) const {
    const auto& k = span_kernels<T>();
    if (sparsifier_) sparsifier_->keep(run, delta);
    if (factors_[run.input] != T{1}) k.scale(run.count, factors_[run.input], delta);
    if (options_.vote != Vote::kUnweighted && weights_[run.input] != T{1})
      k.scale(run.count, weights_[run.input], delta);
  }

  void count_votes(std::int64_t count, const T* deltas, double& positive_minus_negative) const {
    for (std::int64_t e = 0; e < count; ++e) {
      T sum{0};
      for (std::size_t i = 0; i < num_inputs_; ++i) sum += deltas[static_cast<std::int64_t>(i) * count + e];
      positive_minus_negative += sum > T{0} ? 1.0 : sum < T{0} ? -1.0 : 0.0;
    }
  }

  std::size_t num_inputs_;
  TaskVectorOptions options_;
  T lambda_, divisor_{1};
  std::vector<T> weights_, factors_, ones_;
  std::vector<double> kept_;
  double l1_floor_;
  std::unique_ptr<Sparsifier<T>> sparsifier_;
  Needs sparsifier_needs_ = {};
  MajoritySign* majority_;
  int l1_pass_ = 0, majority_pass_ = 0;
};

}  // namespace

template <class T>
std::unique_ptr<TensorMerge<T>> merge_task_vectors(const TensorContext& context, const TaskVectorOptions& options,
                                                   std::unique_ptr<Sparsifier<T>> sparsifier, MajoritySign* majority) {
  return std::make_unique<TaskVectorMerge<T>>(context, options, std::move(sparsifier), majority);
}

template std::unique_ptr<TensorMerge<float>> merge_task_vectors(const TensorContext&, const TaskVectorOptions&,
                                                                std::unique_ptr<Sparsifier<float>>, MajoritySign*);
template std::unique_ptr<TensorMerge<double>> merge_task_vectors(const TensorContext&, const TaskVectorOptions&,
                                                                 std::unique_ptr<Sparsifier<double>>, MajoritySign*);

std::optional<int> copies_base(const TensorContext& context) {
  const bool no_weight =
      std::ranges::all_of(context.inputs, [](const auto& input) { return input.parameters["weight"] == 0.0; });
  if (no_weight || context.shared["lambda"] == 0.0) return -1;
  return std::nullopt;
}

std::uint64_t mask_key(const TensorContext& context, std::string_view method, std::size_t input) {
  std::string name(method);
  for (const std::string& part : {context.inputs[input].identity, context.name}) name.append(1, '\n').append(part);
  return stream_seed(context.seed, name);
}

Rescale rescale_of(const TensorContext& context, Rescale published) {
  switch (static_cast<std::size_t>(context.shared["rescale"])) {
    case 0:
    case 2: return Rescale::kNone;
    case 1: return context.dialect == Dialect::kMergekit ? Rescale::kL1 : published;
    case 3: return Rescale::kL1;
    case 4: return Rescale::kInverseDensity;
    default: return published == Rescale::kInverseProbability ? published : Rescale::kInverseDensity;
  }
}

}  // namespace mergex::merging
