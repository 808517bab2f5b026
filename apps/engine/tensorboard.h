#pragma once

#include <filesystem>
#include <functional>

#include "io/json.h"

namespace mergex::engine {

/// Writes lines of metrics.jsonl as TensorBoard's scalars: `train/loss`, `validation/accuracy`, ... The file is made
/// when the first line comes, in `folder`.
std::function<void(const io::Json& line)> tensorboard_observer(const std::filesystem::path& folder);

}  // namespace mergex::engine
