#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "tasks/encoded_data.h"
#include "text/t5_tokenizer.h"

namespace mergex::engine {

struct FinetunePlan;

/// Examples as the model reads them; rows of a sweep that share task and tokenizer share one of these.
struct Dataset : tasks::EncodedData {
  std::shared_ptr<text::T5Tokenizer> tokenizer;
};

/// Where encoded data are kept between runs: `$MERGEX_CACHE_DIR`, else `$XDG_CACHE_HOME/mergex`, else ~/.cache/mergex;
/// nothing where none of them is set.
std::optional<std::filesystem::path> cache_folder();

/// Reads and encodes once per distinct (task, tokenizer), or takes what an earlier run has encoded.
class DatasetCache {
 public:
  /// @param num_threads  that encode  @param may_write  whether what is encoded is kept for later runs
  DatasetCache(std::int64_t num_threads, bool may_write) : num_threads_(num_threads), may_write_(may_write) {}

  std::shared_ptr<const Dataset> get(const FinetunePlan& plan);

 private:
  tasks::EncodedData load(const FinetunePlan& plan, const text::T5Tokenizer& tokenizer) const;

  std::int64_t num_threads_;
  bool may_write_;
  std::map<std::string, std::shared_ptr<const Dataset>> datasets_;
};

}  // namespace mergex::engine
