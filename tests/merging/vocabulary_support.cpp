#include "merging/vocabulary_support.h"

#include "support/paths.h"
#include "text/vocabulary.h"

namespace mergex::test {
namespace fs = std::filesystem;

namespace {

std::vector<float> floats(const io::TensorView& view) {
  std::vector<float> values(static_cast<std::size_t>(view.num_elements()));
  std::memcpy(values.data(), view.bytes.data(), view.bytes.size());
  return values;
}

}  // namespace

MemorySource::MemorySource(std::vector<float> values)
    : values_(std::move(values)),
      view_{"", io::DType::kF32, {static_cast<std::int64_t>(values_.size())}, std::as_bytes(std::span(values_))} {}

MemorySource::MemorySource(const io::TensorView& view) : values_(floats(view)), view_(view) {}

void MemorySource::read(std::int64_t begin, std::int64_t count, float* out) const {
  for (std::int64_t i = 0; i < count; ++i) out[i] = values_.at(static_cast<std::size_t>(begin + i));
}

void MemorySource::read(std::int64_t begin, std::int64_t count, double* out) const {
  for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<double>(values_.at(static_cast<std::size_t>(begin + i)));
}

std::vector<double> all_values(const merging::Source& source, std::int64_t count) {
  std::vector<double> values(static_cast<std::size_t>(count));
  source.read(0, count, values.data());
  return values;
}

void write_tokenizer(const merging::VocabularyPlan& plan, const fs::path& folder) {
  fs::create_directories(folder);
  for (const auto& [name, content] : plan.written_files) write_text(folder / name, content);
  for (const auto& name : plan.copied_files) fs::copy_file(plan.tokenizer_folder / name, folder / name);
}

std::map<std::string, std::int64_t> written_ids(const merging::VocabularyPlan& plan) {
  TemporaryFolder folder;
  write_tokenizer(plan, folder.path());
  const auto vocabulary = text::Vocabulary::read(folder.path());
  std::map<std::string, std::int64_t> ids;
  for (const auto& token : vocabulary.tokens()) ids[token.text] = token.id;
  return ids;
}

}  // namespace mergex::test
