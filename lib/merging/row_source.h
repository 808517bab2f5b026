#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "io/safetensors.h"
#include "merging/source.h"

namespace mergex::merging {

/// A run of rows of an aligned matrix and where their values come from.
struct RowRun {
  enum class Kind {
    kStored,     ///< consecutive rows of a model's tensor
    kMean,       ///< one row: the mean of rows of several models
    kZero,
    kMeanOfAll,  ///< the mean of all rows of the aligned matrix that are not of this kind
  };
  std::int64_t begin = 0, count = 0;  ///< rows of the aligned matrix
  Kind kind = Kind::kZero;
  std::size_t model = 0;              ///< kStored
  std::int64_t row = 0;               ///< kStored: the model's row that becomes `begin`; kMean: index in RowMap::means
};

/// How one model's vocabulary tensor becomes a matrix with the rows of the result.
struct RowMap {
  struct ModelRow {
    std::size_t model = 0;
    std::int64_t row = 0;
  };
  std::int64_t rows = 0;
  std::vector<RowRun> runs = {};  ///< in order, without gaps
  std::vector<std::vector<ModelRow>> means = {};

  /// Appends one row; runs of consecutive stored rows, of zeros and of means of all rows are joined.
  void append(RowRun::Kind kind, std::size_t model = 0, std::int64_t row = 0);
  void append_mean(std::vector<ModelRow> rows);
};

/// The first `rows` rows of a model's tensor.
RowMap leading_rows(std::size_t model, std::int64_t rows);

/// A vocabulary tensor [rows, ...] read through a row map. Means are computed in float64.
class RowSource final : public Source {
 public:
  struct Part {
    const Source* source = nullptr;  ///< the same tensor of one model; nullptr where the map does not name it
    std::int64_t rows = 0;           ///< that it has
  };

  /// @param parts       by index of model; they outlive this
  /// @param row_length  values per row: the hidden size, 1 for a bias
  /// @throws std::invalid_argument when the map names a row that a part does not have
  RowSource(std::shared_ptr<const RowMap> map, std::vector<Part> parts, std::int64_t row_length);

  void read(std::int64_t begin, std::int64_t count, float* out) const override;
  void read(std::int64_t begin, std::int64_t count, double* out) const override;
  /// Where all rows are consecutive rows of one stored tensor.
  const io::TensorView* stored() const override;

 private:
  template <class T>
  void read_rows(std::int64_t begin, std::int64_t count, T* out) const;
  template <class T>
  void read_mean(std::span<const RowMap::ModelRow> rows, std::int64_t column, std::int64_t count, T* out) const;
  std::span<const double> mean_of_all() const;

  std::shared_ptr<const RowMap> map_;
  std::vector<Part> parts_;
  std::int64_t row_length_;
  const io::TensorView* stored_ = nullptr;
  io::TensorView leading_;  // what stored_ points to where the map takes only some rows
  mutable std::once_flag mean_is_known_;
  mutable std::vector<double> mean_;
};

/// Whether a tensor has one row per token: the input embedding or the head (weight or bias) of T5, GPT-2, RoBERTa,
/// BERT, Phi, Llama, Mistral, Qwen and Gemma, told by the end of its name and by its first dimension.
/// @param rows  of the model's input embedding
bool is_vocabulary_tensor(std::string_view name, std::span<const std::int64_t> shape, std::int64_t rows);

}  // namespace mergex::merging
