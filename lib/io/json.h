#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace mergex::io {

/// Keeps the order of keys, so that what is written back reads like what was read.
using Json = nlohmann::ordered_json;

/// Parses strictly: a repeated key, a comment or trailing text is an error.
/// @throws UserError "<origin>:<line>:<column>: ..."
Json parse_json(std::string_view text, const std::string& origin);

/// @throws UserError when the file is missing, unreadable or not strict JSON
Json read_json(const std::filesystem::path& path);

/// Written to a temporary name, synced and renamed; indented, ends with a line feed.
void write_json(const std::filesystem::path& path, const Json& value);

/// A value as error messages show it: compact, cut after 60 characters.
std::string shown(const Json& value);

}  // namespace mergex::io
