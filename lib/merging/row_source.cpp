#include "merging/row_source.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace mergex::merging {

void RowMap::append(RowRun::Kind kind, std::size_t model, std::int64_t row) {
  const auto begin = rows++;
  if (!runs.empty() && runs.back().kind == kind && kind != RowRun::Kind::kMean) {
    auto& last = runs.back();
    if (kind != RowRun::Kind::kStored || (last.model == model && last.row + last.count == row)) {
      ++last.count;
      return;
    }
  }
  runs.push_back({.begin = begin, .count = 1, .kind = kind, .model = model, .row = row});
}

void RowMap::append_mean(std::vector<ModelRow> of) {
  append(RowRun::Kind::kMean, 0, static_cast<std::int64_t>(means.size()));
  means.push_back(std::move(of));
}

RowMap leading_rows(std::size_t model, std::int64_t rows) {
  RowMap map{.rows = rows};
  if (rows > 0) map.runs.push_back({.begin = 0, .count = rows, .kind = RowRun::Kind::kStored, .model = model});
  return map;
}

RowSource::RowSource(std::shared_ptr<const RowMap> map, std::vector<Part> parts, std::int64_t row_length)
    : map_(std::move(map)), parts_(std::move(parts)), row_length_(row_length) {
  const auto check = [&](std::size_t model, std::int64_t row, std::int64_t count) {
    if (model >= parts_.size() || parts_[model].source == nullptr || row < 0 || row + count > parts_[model].rows) {
      throw std::invalid_argument("a row map names rows " + std::to_string(row) + " to " + std::to_string(row + count) +
                                  " of model " + std::to_string(model) + ", which does not have them");
    }
  };
  for (const auto& run : map_->runs) {
    if (run.kind == RowRun::Kind::kStored) check(run.model, run.row, run.count);
  }
  for (const auto& mean : map_->means) {
    for (const auto& [model, row] : mean) check(model, row, 1);
  }

  if (map_->runs.size() != 1 || map_->runs[0].kind != RowRun::Kind::kStored) return;
  const auto& run = map_->runs[0];
  const auto* whole = parts_[run.model].source->stored();
  if (whole == nullptr) return;
  stored_ = whole;
  if (run.row == 0 && run.count == parts_[run.model].rows) return;
  const auto row_bytes = static_cast<std::size_t>(row_length_) * io::dtype_size(whole->dtype);
  leading_ = *whole;
  leading_.shape.at(0) = run.count;
  leading_.bytes = whole->bytes.subspan(static_cast<std::size_t>(run.row) * row_bytes,
                                        static_cast<std::size_t>(run.count) * row_bytes);
  stored_ = &leading_;
}

const io::TensorView* RowSource::stored() const { return stored_; }
void RowSource::read(std::int64_t begin, std::int64_t count, float* out) const { read_rows(begin, count, out); }
void RowSource::read(std::int64_t begin, std::int64_t count, double* out) const { read_rows(begin, count, out); }

template <class T>
void RowSource::read_rows(std::int64_t begin, std::int64_t count, T* out) const {
  if (count == 0) return;
  auto run = std::ranges::upper_bound(map_->runs, begin / row_length_, {}, &RowRun::begin) - 1;
  for (; count > 0; ++run) {
    const auto offset = begin - run->begin * row_length_;
    const auto n = std::min(count, run->count * row_length_ - offset);
    switch (run->kind) {
      case RowRun::Kind::kStored:
        parts_[run->model].source->read(run->row * row_length_ + offset, n, out);
        break;
      case RowRun::Kind::kMean:
        read_mean(map_->means[static_cast<std::size_t>(run->row)], offset, n, out);
        break;
      case RowRun::Kind::kZero:
        std::fill_n(out, n, T{0});
        break;
      case RowRun::Kind::kMeanOfAll: {
        const auto mean = mean_of_all();
        for (std::int64_t i = 0; i < n; ++i) {
          out[i] = static_cast<T>(mean[static_cast<std::size_t>((offset + i) % row_length_)]);
        }
        break;
      }
    }
    begin += n;
    count -= n;
    out += n;
  }
}

template <class T>
void RowSource::read_mean(std::span<const RowMap::ModelRow> rows, std::int64_t column, std::int64_t count,
                          T* out) const {
  std::array<double, 512> values, sums;
  while (count > 0) {
    const auto n = std::min(count, static_cast<std::int64_t>(values.size()));
    sums.fill(0.0);
    for (const auto& [model, row] : rows) {
      parts_[model].source->read(row * row_length_ + column, n, values.data());
      for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) sums[i] += values[i];
    }
    for (std::int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<T>(sums[static_cast<std::size_t>(i)] / static_cast<double>(rows.size()));
    }
    column += n;
    count -= n;
    out += n;
  }
}

std::span<const double> RowSource::mean_of_all() const {
  std::call_once(mean_is_known_, [&] {
    const auto length = static_cast<std::size_t>(row_length_);
    std::vector<double> row(length), sums(length);
    std::int64_t num_rows = 0;
    for (const auto& run : map_->runs) {
      if (run.kind == RowRun::Kind::kMeanOfAll) continue;
      num_rows += run.count;
      for (std::int64_t r = run.begin; r < run.begin + run.count; ++r) {
        read_rows(r * row_length_, row_length_, row.data());
        for (std::size_t i = 0; i < length; ++i) sums[i] += row[i];
      }
    }
    for (auto& value : sums) value /= static_cast<double>(std::max<std::int64_t>(num_rows, 1));
    mean_ = std::move(sums);
  });
  return mean_;
}

bool is_vocabulary_tensor(std::string_view name, std::span<const std::int64_t> shape, std::int64_t rows) {
  constexpr std::array<std::string_view, 13> kEnds{
      "embed_tokens.weight",             // Llama, Mistral, Qwen, Gemma, Phi, copies in T5
      "wte.weight",                      // GPT-2
      "shared.weight",                   // T5
      "word_embeddings.weight",          // BERT, RoBERTa
      "lm_head.weight", "lm_head.bias",  // all but BERT
      "lm_head.decoder.weight", "lm_head.decoder.bias",  // RoBERTa
      "cls.predictions.bias", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias",  // BERT
      "embed_in.weight", "embed_out.weight",  // GPT-NeoX
  };
  if (shape.empty() || shape[0] != rows) return false;
  return std::ranges::any_of(kEnds, [&](std::string_view end) {
    return name.ends_with(end) && (name.size() == end.size() || name[name.size() - end.size() - 1] == '.');
  });
}

}  // namespace mergex::merging
