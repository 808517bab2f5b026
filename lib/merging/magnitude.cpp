#include "merging/magnitude.h"

#include <algorithm>
#include <array>
#include <bit>

#include "core/error.h"

namespace mergex::merging {
namespace {

template <class T>
std::span<const T> values_of(const Run<T>& run, const T* delta) {
  return {delta, static_cast<std::size_t>(run.count)};
}

template <class T>
double threshold_value(const RankBoundary<T>& boundary) {
  return boundary.found ? static_cast<double>(std::bit_cast<T>(boundary.magnitude)) : 0.0;
}

/// Values by whose magnitude a run is ranked: its own, or what is left of them in a 16-bit type.
template <class T>
class Keys {
 public:
  Keys(std::optional<io::DType> rounded_to, std::int64_t count, const T* values) : keys_(values) {
    if (!rounded_to) return;
    std::array<std::uint16_t, kBlock> stored;
    narrow_values(*rounded_to, count, values, stored.data());
    widen_values(*rounded_to, count, stored.data(), buffer_.data());
    keys_ = buffer_.data();
  }
  Keys(const Keys&) = delete;
  Keys& operator=(const Keys&) = delete;
  const T* data() const { return keys_; }

 private:
  const T* keys_;
  std::array<T, kBlock> buffer_;
};

template <class T>
class BandSparsifier final : public Sparsifier<T> {
 public:
  BandSparsifier(const std::vector<RankBandSize>& sizes, const TensorContext& context)
      : num_elements_(context.num_elements()),
        rounded_to_(context.dialect == Dialect::kMergekit ? context.native : std::nullopt),
        sizes_(sizes),
        search_(sizes.size(), std::ranges::any_of(sizes, [](const auto& s) { return s.first > 0; }) ? 2 : 1,
                rounded_to_ == io::DType::kBF16 ? RankSearch<T>::kPasses / 2 : RankSearch<T>::kPasses) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      search_.set_rank(i, 0, sizes[i].last);
      if (search_.ranks_per_stream() == 2) search_.set_rank(i, 1, sizes[i].first);
    }
  }

  typename TensorMerge<T>::Needs needs() const override {
    return {.passes = kTiesPass + 1,
            .sums = bracket_.num_sums(),
            .counts = search_.num_counts(),
            .state = band_.num_state(),
            .lists = bracket_.num_lists(),
            .listed = bracket_.max_listed() + kBlock,
            .samples_first = true};
  }
  bool wants(int pass) const override {
    if (pass < kFirstDigit) return search_.wants(0);
    if (is_bracketed_) return false;
    return pass == kTiesPass ? band_.wants_ties() : search_.wants(pass - kFirstDigit);
  }

  void gather(int pass, const Run<T>& run, const T* delta) const override {
    over_keys(run, delta, [&](std::int64_t, std::span<const T> keys) {
      if (pass == kSample) {
        bracket_.gather_sample(run.input, keys, run.lists);
      } else if (pass == kBracket) {
        bracket_.gather(run.input, keys, run.sums, run.lists);
      } else if (pass == kTiesPass) {
        band_.gather_ties(run.input, keys, run.sums);
      } else {
        search_.gather(pass - kFirstDigit, run.input, keys, run.counts);
      }
    });
  }
  void finish(int pass, const Totals& totals) override {
    if (pass == kSample) {
      bracket_.finish_sample(totals);
    } else if (pass == kBracket) {
      const auto ties = bracket_.finish(totals, search_);
      is_bracketed_ = !ties.empty();
      const std::vector<double> sums(band_.num_sums());
      if (is_bracketed_) band_.finish_ties({.sums = sums, .unit_sums = ties, .counts = {}});
    } else if (pass == kTiesPass) {
      band_.finish_ties(totals);
    } else {
      search_.finish(pass - kFirstDigit, totals.counts);
    }
  }

  void keep(const Run<T>& run, T* delta) const override {
    over_keys(run, delta, [&](std::int64_t begin, std::span<const T> keys) {
      band_.keep(run.input, run.unit, keys, delta + begin, run.state);
    });
  }

  void report(io::Json& entry) const override {
    auto kept = io::Json::array(), thresholds = io::Json::array();
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      const auto count = std::min(sizes_[i].last, num_elements_) - std::min(sizes_[i].first, num_elements_);
      kept.push_back(num_elements_ == 0 ? 1.0 : static_cast<double>(count) / static_cast<double>(num_elements_));
      thresholds.push_back(threshold_value(search_.boundary(i)));
    }
    entry["kept"] = kept;
    entry["threshold"] = thresholds;
  }

 private:
  template <class Body>
  void over_keys(const Run<T>& run, const T* delta, Body body) const {
    for (std::int64_t begin = 0; begin < run.count; begin += kBlock) {
      const auto count = std::min(kBlock, run.count - begin);
      const Keys<T> keys(rounded_to_, count, delta + begin);
      body(begin, std::span(keys.data(), static_cast<std::size_t>(count)));
    }
  }

  // Where the bracket finds the boundaries, the passes after it are left out.
  static constexpr int kSample = 0, kBracket = 1, kFirstDigit = 2, kTiesPass = kFirstDigit + RankSearch<T>::kPasses;
  std::int64_t num_elements_;
  std::optional<io::DType> rounded_to_;
  std::vector<RankBandSize> sizes_;
  RankSearch<T> search_;
  RankBracket<T> bracket_{search_, num_elements_};
  RankBand<T> band_{search_};
  bool is_bracketed_ = false;
};

class GlobalSparsifier final : public Sparsifier<float> {
 public:
  GlobalSparsifier(const TensorContext& context, GlobalTrim& trim) : trim_(&trim), band_(trim.search()) {
    trim.join(context, band_);
  }

  TensorMerge<float>::Needs needs() const override {
    return {.passes = kPasses + 1,
            .sums = band_.num_sums(),
            .counts = trim_->search().num_counts(),
            .state = band_.num_state()};
  }
  bool wants(int pass) const override { return pass == kPasses ? band_.wants_ties() : trim_->search().wants(pass); }

  void gather(int pass, const Run<float>& run, const float* delta) const override {
    if (pass == kPasses) {
      band_.gather_ties(run.input, values_of(run, delta), run.sums);
    } else {
      trim_->search().gather(pass, run.input, values_of(run, delta), run.counts);
    }
  }
  void finish(int pass, const Totals& totals) override {
    if (pass == kPasses) {
      band_.finish_ties(totals);
    } else {
      trim_->add(totals.counts);
    }
  }

  void keep(const Run<float>& run, float* delta) const override {
    band_.keep(run.input, run.unit, values_of(run, delta), delta, run.state);
  }

  void report(io::Json& entry) const override {
    auto thresholds = io::Json::array();
    for (std::size_t i = 0; i < trim_->search().num_streams(); ++i) {
      thresholds.push_back(threshold_value(trim_->search().boundary(i)));
    }
    entry["threshold"] = thresholds;
  }

 private:
  static constexpr int kPasses = RankSearch<float>::kPasses;
  GlobalTrim* trim_;
  RankBand<float> band_;
};

}  // namespace

std::int64_t portion(double fraction, std::int64_t count) {
  return fraction >= 1.0 ? RankBandSize::kAll : static_cast<std::int64_t>(fraction * static_cast<double>(count));
}

template <class T>
std::unique_ptr<Sparsifier<T>> keep_band(
    const TensorContext& context, const std::function<RankBandSize(const TensorContext::Input&, std::int64_t)>& band) {
  std::vector<RankBandSize> sizes;
  for (const auto& input : context.inputs) sizes.push_back(band(input, context.num_elements()));
  return std::make_unique<BandSparsifier<T>>(sizes, context);
}

template std::unique_ptr<Sparsifier<float>> keep_band(
    const TensorContext&, const std::function<RankBandSize(const TensorContext::Input&, std::int64_t)>&);
template std::unique_ptr<Sparsifier<double>> keep_band(
    const TensorContext&, const std::function<RankBandSize(const TensorContext::Input&, std::int64_t)>&);

GlobalTrim::GlobalTrim(std::size_t num_inputs) : search_(num_inputs), counts_(search_.num_counts()) {}

void GlobalTrim::join(const TensorContext& context, RankBand<float>& band) {
  for (std::size_t i = 0; i < context.inputs.size(); ++i) {
    const double density = context.inputs[i].parameters["density"];
    if (i == density_.size()) {
      density_.push_back(density);
      // The rank is known when all tensors have joined; until then any that is to be looked for.
      search_.set_rank(i, 0, density <= 0.0 ? 0 : density >= 1.0 ? RankBandSize::kAll : 1);
    } else if (density_[i] != density) {
      fail("{}: density is {}, elsewhere {}; a trim over the whole model needs one density per model", context.name,
           density, density_[i]);
    }
  }
  keep_all_ties_ = context.dialect == Dialect::kFusionBench;
  num_elements_ += context.num_elements();
  bands_.push_back(&band);
}

void GlobalTrim::add(std::span<const std::uint64_t> counts) {
  for (std::size_t i = 0; i < counts.size(); ++i) counts_[i] += counts[i];
}

void GlobalTrim::finish(int pass) {
  if (pass < RankSearch<float>::kPasses) {
    if (pass == 0) {
      for (std::size_t i = 0; i < density_.size(); ++i) {
        if (density_[i] <= 0.0 || density_[i] >= 1.0) continue;
        const auto k = std::max<std::int64_t>(1, portion(density_[i], num_elements_));
        search_.set_rank(i, 0, keep_all_ties_ ? k + 1 : k);
      }
    }
    search_.finish(pass, counts_);
    if (keep_all_ties_) {
      for (std::size_t i = 0; i < density_.size(); ++i) search_.keep_all_ties(i);
    }
    counts_.assign(counts_.size(), 0);
  } else if (pass == RankSearch<float>::kPasses) {
    for (std::size_t boundary = 0; boundary < density_.size(); ++boundary) {
      std::int64_t before = 0;
      for (auto* band : bands_) {
        band->set_ties_before(boundary, before);
        before += band->ties_here(boundary);
      }
    }
  }
}

std::unique_ptr<Sparsifier<float>> trim_globally(const TensorContext& context, GlobalTrim& trim) {
  return std::make_unique<GlobalSparsifier>(context, trim);
}

}  // namespace mergex::merging
