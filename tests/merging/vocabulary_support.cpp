#include "merging/vocabulary_support.h"

#include <cstring>

#include "support/paths.h"

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

SmallTokenizer SmallTokenizer::of(const std::vector<std::string>& tokens) {
  SmallTokenizer tokenizer;
  for (const auto& token : tokens) tokenizer.vocab.emplace(token, static_cast<std::int64_t>(tokenizer.vocab.size()));
  return tokenizer;
}

fs::path SmallTokenizer::write(const fs::path& folder) const {
  io::Json pairs = io::Json::array(), added_tokens = io::Json::array(), ids = io::Json::object();
  for (const auto& [token, id] : vocab) ids[token] = id;
  for (const auto& [left, right] : merges) pairs.push_back(io::Json::array({left, right}));
  for (const auto& token : added) {
    added_tokens.push_back({{"id", token.id}, {"content", token.text}, {"single_word", token.added->single_word},
                            {"lstrip", token.added->lstrip}, {"rstrip", token.added->rstrip},
                            {"normalized", token.added->normalized}, {"special", token.added->special}});
  }
  const io::Json model{{"type", "BPE"}, {"vocab", ids}, {"merges", pairs}};
  const io::Json tokenizer{{"version", "1.0"}, {"added_tokens", added_tokens}, {"model", model}};
  fs::create_directories(folder);
  write_text(folder / "tokenizer.json", tokenizer.dump(2));
  write_text(folder / "config.json", config.dump(2));
  write_text(folder / "tokenizer_config.json", tokenizer_config.dump(2));
  return folder;
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
