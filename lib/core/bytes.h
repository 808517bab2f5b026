#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace mergex {

/// "5GB", "512MiB", "4096", "1.5 GiB" -> bytes. K, M, G, T with or without B are powers of 1000, Ki, Mi, Gi, Ti of 1024.
/// @param where  for messages: "--memory"
/// @throws UserError for anything else, and for less than one byte
std::uint64_t parse_bytes(std::string_view text, std::string_view where);

/// "0 B", "17.3 kB", "2.90 GB"
std::string bytes_text(std::uint64_t bytes);

}  // namespace mergex
