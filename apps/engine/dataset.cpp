#include "dataset.h"

#include <cstdlib>

#include "core/error.h"
#include "core/log.h"
#include "finetune_plan.h"
#include "io/checkpoint_folder.h"
#include "tasks/corrupt_spans.h"
#include "tasks/files.h"
#include "tasks/text_to_text.h"

namespace mergex::engine {
namespace fs = std::filesystem;

namespace {

/// Tokens of a document's piece that fills `max_length` once corrupted.
std::int64_t piece_length(const FinetunePlan& plan) {
  const auto lengths = tasks::span_lengths(plan.task.max_length, *plan.task.span_corruption);
  if (lengths.spans > text::T5Tokenizer::kNumSentinels) {
    fail("{}/max_length: got {}, which has {} masked spans, but the tokenizer has {} sentinels; lower it, or raise "
         "mean_span_length",
         plan.task_origin, plan.task.max_length, lengths.spans, text::T5Tokenizer::kNumSentinels);
  }
  return lengths.text;
}

/// A model can only write what its tokenizer can.
void check_answers(const FinetunePlan& plan, const std::vector<std::string>& labels, const text::T5Tokenizer& tokenizer) {
  for (const auto& answer : tasks::possible_targets(labels)) {
    const auto written = tokenizer.decode(tokenizer.encode(answer), /*skip_special=*/true);
    if (written == answer) continue;
    fail("{}/format: got \"text_to_text\", but the tokenizer {} writes the answer \"{}\" as \"{}\"; use another one, or "
         "\"plain\"",
         plan.task_origin, tokenizer.model_file().string(), answer, written);
  }
}

tasks::EncodedData encode(const FinetunePlan& plan, const text::T5Tokenizer& tokenizer, std::int64_t num_threads) {
  tasks::EncodedData result{.data = plan.task.load({}), .train = {}, .validation = {}};
  const auto threads = static_cast<int>(num_threads);
  log::debug("encoding {}", plan.task.name);
  const auto encode_split = [&](tasks::Split& split) {
    auto encoded = plan.task.span_corruption ? tasks::encode_pieces(split, tokenizer, piece_length(plan), threads)
                                             : tasks::encode(split, tokenizer, plan.task.max_length, threads);
    if (encoded.empty()) fail("{}: holds no text of two tokens or more; give another file", split.file.string());
    split.examples = {};
    return encoded;
  };
  result.train = encode_split(result.data.train);
  for (auto& split : result.data.validation) result.validation.push_back(encode_split(split));
  return result;
}

}  // namespace

std::optional<fs::path> cache_folder() {
  const auto variable = [](const char* name) -> std::optional<fs::path> {
    const char* value = std::getenv(name);
    return value != nullptr && *value != '\0' ? std::optional<fs::path>(value) : std::nullopt;
  };
  if (const auto own = variable("MERGEX_CACHE_DIR")) return own;
  if (const auto caches = variable("XDG_CACHE_HOME")) return *caches / "mergex";
  if (const auto home = variable("HOME")) return *home / ".cache/mergex";
  return std::nullopt;
}

tasks::EncodedData DatasetCache::load(const FinetunePlan& plan, const text::T5Tokenizer& tokenizer) const {
  const auto files = tasks::input_files(plan.task.files, {});
  if (files.size() < 2) {
    fail("{}/files: names no validation file; add it, the best checkpoint is chosen on it", plan.task_origin);
  }
  const auto folder = plan.task.cache ? cache_folder() : std::nullopt;
  if (!folder) return encode(plan, tokenizer, num_threads_);

  auto options = plan.resolved->at("task");
  options.erase("cache");
  const auto key = tasks::encoded_data_key(options, files, tokenizer.model_file());
  const auto path = *folder / "encoded" / (key + ".safetensors");
  std::error_code ignored;
  if (fs::exists(path, ignored)) {
    try {
      auto cached = tasks::read_encoded_data(path, files, tokenizer.vocab_size());
      log::debug("{}: encoded before, read from {}", plan.task.name, path.string());
      return cached;
    } catch (const UserError& error) {
      log::debug("cache not used: {}", error.what());
    }
  }
  auto encoded = encode(plan, tokenizer, num_threads_);
  if (!may_write_) return encoded;
  try {
    fs::create_directories(path.parent_path());
    tasks::write_encoded_data(path, encoded);
    log::debug("{}: encoded, kept in {}", plan.task.name, path.string());
  } catch (const std::exception& error) {  // a full disk, a folder of somebody else: the run does not need it
    log::debug("{}: encoded, not kept: {}", plan.task.name, error.what());
  }
  return encoded;
}

std::shared_ptr<const Dataset> DatasetCache::get(const FinetunePlan& plan) {
  const auto key = plan.resolved->at("task").dump() + plan.model.tokenizer.string();
  if (const auto found = datasets_.find(key); found != datasets_.end()) return found->second;
  // Where the folder itself is wrong, its own complaint says more than that of the tokenizer in it.
  if (plan.model.checkpoint) io::CheckpointFolder{*plan.model.checkpoint};
  auto dataset = std::make_shared<Dataset>();
  dataset->tokenizer = std::make_shared<text::T5Tokenizer>(text::T5Tokenizer::load(plan.model.tokenizer));
  static_cast<tasks::EncodedData&>(*dataset) = load(plan, *dataset->tokenizer);
  if (plan.task.text_to_text) check_answers(plan, dataset->data.labels, *dataset->tokenizer);
  for (const auto& warning : dataset->data.warnings) log::warn("{}", warning);
  for (const auto& note : dataset->data.notes) log::info("{}", note);
  datasets_.emplace(key, dataset);
  return dataset;
}

}  // namespace mergex::engine
