#include <algorithm>
#include <bit>
#include <numeric>

#include <fmt/format.h>

#include "merging/methods.h"
#include "merging/random_mask.h"
#include "merging/task_vectors.h"

namespace mergex::merging {
namespace {

constexpr Parameter kEpsilon{.name = "epsilon",
                             .scope = Parameter::Scope::kInput,
                             .kind = Parameter::Kind::kNumber,
                             .fallback = 0.15,
                             .range = kFraction,
                             .summary =
                                 "how far the chance to be kept rises or falls with the rank: to density +- epsilon "
                                 "(paper: +- epsilon / 2)"};

template <bool normalize>
constexpr Parameter kParameters[] = {
    kWeight, kDensity, kEpsilon, kLambda, normalize_parameter(normalize), rescale_parameter(true), kInt8Mask};

double half_width(const TensorContext& context, const TensorContext::Input& input) {
  const double epsilon = input.parameters["epsilon"];
  return context.dialect == Dialect::kPaper ? epsilon / 2.0 : epsilon;
}

std::string problem(const TensorContext& context) {
  for (const auto& input : context.inputs) {
    const double density = input.parameters["density"], half = half_width(context, input);
    if (density <= 0.0 || density >= 1.0 || (density - half > 0.0 && density + half < 1.0)) continue;
    return fmt::format(
        "density {} and epsilon {} give chances from {} to {}, expected all between 0 and 1; lower epsilon", density,
        input.parameters["epsilon"], density - half, density + half);
  }
  return "";
}

/// Orders a row by magnitude: place of each entry from the smallest, of equal ones the last first.
template <class T>
class RowRanks {
 public:
  std::span<const std::uint32_t> operator()(std::span<const T> row) {
    constexpr std::size_t kDigits = 256;
    std::array<std::array<std::uint32_t, kDigits>, sizeof(T)> place{};
    entries_.resize(row.size());
    sorted_.resize(row.size());
    ranks_.resize(row.size());
    for (std::size_t i = 0; i < row.size(); ++i) {
      const auto size = std::bit_cast<Bits<T>>(row[i]) & (~Bits<T>{0} >> 1);
      entries_[row.size() - 1 - i] = {size, static_cast<std::uint32_t>(i)};
      for (std::size_t d = 0; d < sizeof(T); ++d) ++place[d][size >> (8 * d) & 255];
    }
    // Least digit first (Knuth, volume 3, 5.2.5): each step keeps the order of equal digits.
    for (std::size_t d = 0; d < sizeof(T); ++d) {
      std::exclusive_scan(place[d].begin(), place[d].end(), place[d].begin(), 0u);
      for (const auto& entry : entries_) sorted_[place[d][entry.size >> (8 * d) & 255]++] = entry;
      entries_.swap(sorted_);
    }
    for (std::size_t rank = 0; rank < row.size(); ++rank)
      ranks_[entries_[rank].position] = static_cast<std::uint32_t>(rank);
    return ranks_;
  }

 private:
  struct Entry {
    Bits<T> size;
    std::uint32_t position;
  };
  std::vector<Entry> entries_, sorted_;
  std::vector<std::uint32_t> ranks_;
};

/// Keeps an entry with a chance that rises with its rank within the row.
template <class T>
class RankBernoulliSparsifier final : public Sparsifier<T> {
 public:
  RankBernoulliSparsifier(const TensorContext& context, bool divide_by_chance)
      : row_length_(context.row_length()), divide_by_chance_(divide_by_chance) {
    for (std::size_t i = 0; i < context.inputs.size(); ++i) {
      auto& input = inputs_.emplace_back();
      input.key = mask_key(context, "della", i);
      input.density = context.inputs[i].parameters["density"];
      const double half = half_width(context, context.inputs[i]);
      for (std::int64_t rank = 0; rank < row_length_; ++rank) {
        // From 0 to 1; the only entry of a row stands in the middle.
        const double place = row_length_ == 1 ? 0.5 : static_cast<double>(rank) / static_cast<double>(row_length_ - 1);
        input.chances.push_back(input.density - half + 2.0 * half * place);
        input.thresholds.push_back(chance(input.chances.back()));
      }
    }
  }

  typename TensorMerge<T>::Needs needs() const override { return {.whole_rows = true}; }

  void keep(const Run<T>& run, T* delta) const override {
    const auto& input = inputs_[run.input];
    if (input.density >= 1.0) return;
    if (input.density <= 0.0) {
      std::fill_n(delta, run.count, T{0});
      return;
    }
    RandomWords words(input.key);
    RowRanks<T> ranks_of;
    for (std::int64_t row = 0; row < run.count; row += row_length_) {
      const auto ranks = ranks_of({delta + row, static_cast<std::size_t>(row_length_)});
      for (std::int64_t begin = 0; begin < row_length_; begin += kBlock) {
        const auto n = std::min(kBlock, row_length_ - begin);
        const auto* word = words.draw(run.begin + row + begin, n);
        for (std::int64_t i = 0; i < n; ++i) {
          const auto rank = ranks[static_cast<std::size_t>(begin + i)];
          T& value = delta[row + begin + i];
          value = word[i] < input.thresholds[rank] ? value : T{0};
          if (divide_by_chance_) value /= static_cast<T>(input.chances[rank]);
        }
      }
    }
  }

 private:
  struct Input {
    std::uint64_t key = 0;
    double density = 1.0;
    std::vector<double> chances;            // to be kept, by rank
    std::vector<std::uint32_t> thresholds;  // of words
  };
  std::int64_t row_length_;
  bool divide_by_chance_;
  std::vector<Input> inputs_;
};

template <class T, Vote vote>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState*) {
  const auto rescale = rescale_of(context, Rescale::kInverseProbability);
  return merge_task_vectors<T>(
      context,
      {.vote = vote == Vote::kNone || context.dialect != Dialect::kPeft ? vote : Vote::kUnweighted,
       .rescale = rescale,
       .normalize = context.shared["normalize"] != 0.0},
      std::make_unique<RankBernoulliSparsifier<T>>(context, rescale == Rescale::kInverseProbability));
}

}  // namespace

constinit const Method kDella{
    .name = "della",
    .summary = "drop small entries of each row with a higher chance, then elect signs as TIES",
    .paper = "Deep, Bhardwaj and Poria 2024, arXiv:2406.11617",
    .base = Method::Base::kRequired,
    .parameters = kParameters<true>,
    .is_random = true,
    .problem = problem,
    .copies = copies_base,
    .make_float = make<float, Vote::kWeighted>,
    .make_double = make<double, Vote::kWeighted>};

constinit const Method kDellaLinear{.name = "della_linear",
                                    .summary = "della without the sign election",
                                    .paper = "Deep, Bhardwaj and Poria 2024, arXiv:2406.11617",
                                    .base = Method::Base::kRequired,
                                    .parameters = kParameters<false>,
                                    .is_random = true,
                                    .problem = problem,
                                    .copies = copies_base,
                                    .make_float = make<float, Vote::kNone>,
                                    .make_double = make<double, Vote::kNone>};

}  // namespace mergex::merging
