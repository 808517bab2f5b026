#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/json_object.h"

namespace mergex::recipes {

/// A recipe with everything that it extends merged in and the command line's changes made; its sections are read by
/// the parts that own them.
struct Recipe {
  std::filesystem::path file;
  std::string name = {};
  std::shared_ptr<io::JsonDocument> document = {};
};

/// Reads a recipe file, what it `extends` (merged first, RFC 7386: null deletes), `--set /pointer=value` changes (JSON,
/// or a plain string where it does not parse) and `--seed`.
/// @throws UserError for a missing file, bad JSON, a circle of `extends`, a malformed change
Recipe read_recipe(const std::filesystem::path& file, std::span<const std::string> sets,
                   std::optional<std::int64_t> seed);

/// The same for a document that was read in another way (YAML).
Recipe changed_recipe(io::JsonDocument document, std::span<const std::string> sets, std::optional<std::int64_t> seed);

/// One combination of a recipe's `sweep`.
struct SweepRow {
  std::vector<std::pair<std::string, std::string>> labels;  ///< axis pointer, label of its value
  std::string group;   ///< labels of all axes but /seed, joined: what a table's row stands for
  std::string folder;  ///< name of this run's folder inside the sweep's
  std::shared_ptr<io::JsonDocument> document = {};  ///< the recipe of this row, without `sweep`
};

/// `sweep` names pointers, each with an array of values or an object label -> value; rows are all combinations, the
/// last axis fastest. A recipe without one gives a single row without labels.
/// @throws UserError for a malformed sweep
std::vector<SweepRow> expand_sweep(const Recipe& recipe);

/// RFC 7386: `patch` merged into `target`; `origin` is recorded for what comes from the patch.
void merge_patch(io::JsonDocument& target, const io::Json& patch, const std::string& origin);

}  // namespace mergex::recipes
