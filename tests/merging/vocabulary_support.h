#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "io/json.h"
#include "io/safetensors.h"
#include "merging/source.h"
#include "merging/vocabulary_plan.h"
#include "text/vocabulary.h"

namespace mergex::test {

/// Float32 values in memory.
class MemorySource final : public merging::Source {
 public:
  explicit MemorySource(std::vector<float> values);
  explicit MemorySource(const io::TensorView& view);

  void read(std::int64_t begin, std::int64_t count, float* out) const override;
  void read(std::int64_t begin, std::int64_t count, double* out) const override;
  const io::TensorView* stored() const override { return &view_; }
  std::int64_t size() const { return static_cast<std::int64_t>(values_.size()); }

 private:
  std::vector<float> values_;
  io::TensorView view_;
};

std::vector<double> all_values(const merging::Source& source, std::int64_t count);

/// A folder with config.json, tokenizer.json (byte pair encoding) and tokenizer_config.json.
struct SmallTokenizer {
  std::map<std::string, std::int64_t> vocab = {};
  std::vector<text::BpeMerge> merges = {};
  std::vector<text::Token> added = {};
  io::Json config = {{"vocab_size", 0}};
  io::Json tokenizer_config = io::Json::object();

  /// Tokens with ids 0, 1, ...
  static SmallTokenizer of(const std::vector<std::string>& tokens);
  std::filesystem::path write(const std::filesystem::path& folder) const;
};

/// Writes the tokenizer files of a plan into `folder`, as a merge does.
void write_tokenizer(const merging::VocabularyPlan& plan, const std::filesystem::path& folder);
/// Token -> id of the tokenizer that a plan writes.
std::map<std::string, std::int64_t> written_ids(const merging::VocabularyPlan& plan);

}  // namespace mergex::test
