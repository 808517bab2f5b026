#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "io/json_object.h"

namespace mergex::io {

/// The documents of a YAML file as JSON, keys in their order, each value's origin "<file>:<line>", so that
/// JsonObject reads them like any recipe. Empty documents are left out.
///
/// Scalars mean what YAML 1.1 says (PyYAML, mergekit): yes, on and true are true, ~ and nothing are null, quoted ones
/// are strings; 1e-3 is a number too. Anchors, aliases and merge keys (<<) work. Refused: keys that are no strings or
/// are given twice, tags but for !!str, !!map and !!seq, numbers whose value depends on YAML's version (010, 1_000,
/// 1:30, 0x10), infinities, more than 64 levels, and aliases that expand to more than 16 MiB.
///
/// @throws UserError "<file>:<line>:<column>: ..."
std::vector<JsonDocument> parse_yaml(std::string_view text, const std::string& file);

/// @throws UserError as above, and when the file is missing, unreadable or without any document
std::vector<JsonDocument> read_yaml(const std::filesystem::path& path);

}  // namespace mergex::io
