#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tasks/encode.h"
#include "tasks/task.h"
#include "text/t5_tokenizer.h"

namespace mergex::engine {

struct FinetunePlan;

/// Examples as the model reads them; rows of a sweep that share task and tokenizer share one of these.
struct Dataset {
  tasks::Data data;
  std::vector<tasks::Encoded> train;
  std::vector<std::vector<tasks::Encoded>> validation;  ///< as data.validation
  std::shared_ptr<text::T5Tokenizer> tokenizer;
};

/// Reads and encodes once per distinct (task, tokenizer).
class DatasetCache {
 public:
  std::shared_ptr<const Dataset> get(const FinetunePlan& plan);

 private:
  std::map<std::string, std::shared_ptr<const Dataset>> datasets_;
};

}  // namespace mergex::engine
