#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

namespace mergex::io {

/// 64 lower-case hexadecimal digits (FIPS 180-4).
std::string sha256_hex(std::span<const std::byte> bytes);
/// Read in pieces: a checkpoint need not fit into memory.
/// @throws UserError when the file is missing or cannot be read
std::string sha256_file(const std::filesystem::path& path);

}  // namespace mergex::io
