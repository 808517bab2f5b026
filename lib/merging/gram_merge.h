#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "merging/method.h"
#include "merging/span_kernels.h"

namespace mergex::merging {

/// Inner products of vectors, in float64.
class Gram {
 public:
  explicit Gram(std::size_t size) : size_(size), products_(size * size) {}
  std::size_t size() const { return size_; }
  double operator()(std::size_t i, std::size_t j) const { return products_[i * size_ + j]; }
  void set(std::size_t i, std::size_t j, double product) {
    products_[i * size_ + j] = products_[j * size_ + i] = product;
  }
  double norm(std::size_t i) const { return std::sqrt((*this)(i, i)); }
  /// 0 where a vector is 0.
  double cosine(std::size_t i, std::size_t j) const {
    const double norms = norm(i) * norm(j);
    return norms == 0.0 ? 0.0 : std::clamp((*this)(i, j) / norms, -1.0, 1.0);
  }

 private:
  std::size_t size_;
  std::vector<double> products_;
};

/// The result as a sum of the vectors, and what the report says of it.
struct Combination {
  std::vector<double> coefficients;
  std::optional<double> interpolation = {};
  std::string note = {};
};

/// A merge that is a linear combination of tensors, with coefficients that follow from their inner products: of the
/// whole tensor (one pass before the result) or row by row. Everything is computed in float64 and rounded once.
template <class T>
class GramMerge : public TensorMerge<T> {
 public:
  enum class Vectors {
    kInputs,
    kBaseAndInputs,  ///< the base is vector 0
    kTaskVectors,    ///< inputs - base; the combination is added to the base
  };

  GramMerge(const TensorContext& context, Vectors vectors, bool per_row)
      : vectors_(vectors),
        per_row_(per_row),
        size_(context.inputs.size() + (vectors == Vectors::kBaseAndInputs ? 1 : 0)),
        row_length_(context.row_length()) {}

  typename TensorMerge<T>::Needs needs() const override {
    if (per_row_) return {.whole_rows = true};
    return {.passes = 1, .sums = num_pairs() * kLanes};
  }

  void gather(int, const Tile<T>& tile, const Workspace<T>& workspace) const override {
    for (std::int64_t begin = 0; begin < tile.count; begin += kBlock) {
      add_products(tile, begin, std::min(kBlock, tile.count - begin), tile.begin + begin, workspace.sums);
    }
  }

  void finish(int, const Totals& totals) override {
    gram_ = gram_of(totals.sums);
    combination_ = combination(gram_);
  }

  void merge(const Tile<T>& tile, const Workspace<T>&, T* out) const override {
    if (!per_row_) return add_up(tile, 0, tile.count, combination_.coefficients, out);
    std::vector<double> lanes(num_pairs() * kLanes);
    for (std::int64_t row = 0; row < tile.count; row += row_length_) {
      std::ranges::fill(lanes, 0.0);
      add_products(tile, row, row_length_, 0, lanes);
      add_up(tile, row, row_length_, combination(gram_of(lanes)).coefficients, out + row);
    }
  }

  void report(io::Json& entry) const override {
    if (per_row_) return;
    auto norms = io::Json::array(), cosines = io::Json::array();
    for (std::size_t i = 0; i < size_; ++i) {
      norms.push_back(gram_.norm(i));
      for (std::size_t j = i + 1; j < size_; ++j) cosines.push_back(gram_.cosine(i, j));
    }
    entry["norms"] = norms;
    entry["cosine"] = cosines;
    entry["coefficients"] = combination_.coefficients;
    if (combination_.interpolation) entry["interpolation"] = *combination_.interpolation;
    if (!combination_.note.empty()) entry["note"] = combination_.note;
  }

 protected:
  /// Called once for the tensor, or for every row.
  virtual Combination combination(const Gram& gram) const = 0;

 private:
  std::size_t num_pairs() const { return size_ * (size_ + 1) / 2; }

  const T* vector(const Tile<T>& tile, std::size_t i) const {
    if (vectors_ != Vectors::kBaseAndInputs) return tile.inputs[i];
    return i == 0 ? tile.base : tile.inputs[i - 1];
  }
  const T* origin(const Tile<T>& tile) const { return vectors_ == Vectors::kTaskVectors ? tile.base : nullptr; }

  void add_products(const Tile<T>& tile, std::int64_t begin, std::int64_t count, std::int64_t first,
                    std::span<double> lanes) const {
    const T* base = origin(tile) == nullptr ? nullptr : origin(tile) + begin;
    double* sum = lanes.data();
    for (std::size_t i = 0; i < size_; ++i) {
      for (std::size_t j = i; j < size_; ++j, sum += kLanes) {
        span_kernels<T>().dot(count, first % kLanes, vector(tile, i) + begin, vector(tile, j) + begin, base, sum);
      }
    }
  }

  Gram gram_of(std::span<const double> lanes) const {
    Gram gram(size_);
    const double* sum = lanes.data();
    for (std::size_t i = 0; i < size_; ++i) {
      for (std::size_t j = i; j < size_; ++j, sum += kLanes) {
        double product = 0.0;
        for (int lane = 0; lane < kLanes; ++lane) product += sum[lane];
        gram.set(i, j, product);
      }
    }
    return gram;
  }

  void add_up(const Tile<T>& tile, std::int64_t begin, std::int64_t count, const std::vector<double>& coefficients,
              T* out) const {
    // What counts for nothing is not read, so that a 0 does not turn an infinity into a NaN.
    std::vector<const T*> terms;
    std::vector<double> factors;
    for (std::size_t i = 0; i < size_; ++i) {
      if (coefficients[i] == 0.0) continue;
      terms.push_back(vector(tile, i) + begin);
      factors.push_back(coefficients[i]);
    }
    const T* base = origin(tile) == nullptr ? nullptr : origin(tile) + begin;
    if (factors.size() == 1 && factors[0] == 1.0) {
      std::copy_n(terms[0], count, out);
    } else if (!factors.empty()) {
      span_kernels<T>().combine(count, static_cast<std::int64_t>(terms.size()), terms.data(), factors.data(), base,
                                out);
    } else if (base != nullptr) {
      std::copy_n(base, count, out);
    } else {
      std::fill_n(out, count, T{0});
    }
  }

  Vectors vectors_;
  bool per_row_;
  std::size_t size_;
  std::int64_t row_length_;
  Gram gram_{0};
  Combination combination_ = {};
};

}  // namespace mergex::merging
