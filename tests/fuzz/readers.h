#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz/mutator.h"

namespace mergex::fuzz {

/// A reader of files that anybody may have made.
struct Reader {
  std::string_view name, summary;
  /// Valid inputs to start from.
  std::vector<std::string> (*seeds)();
  /// Words of the format.
  std::vector<std::string> tokens;
  /// A damaged version of an input.
  std::string (*mutate)(Mutator& mutator, const std::string& input, std::span<const std::string> others);
  /// Reads the input that lies in `file` and says what it is like ("read, 3 tensors"); further files may be written
  /// beside it. @throws UserError when it is refused; anything else is a bug
  std::string (*read)(const std::filesystem::path& file, const std::string& input);
};

std::span<const Reader> readers();

}  // namespace mergex::fuzz
