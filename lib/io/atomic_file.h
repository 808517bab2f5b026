#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace mergex::io {

/// The bytes of a file. @throws UserError when it is missing or cannot be read
std::string read_file(const std::filesystem::path& path);

/// Writes through `write(fd)` into a temporary name beside `path`, syncs it and renames it: a reader sees the old
/// file or the whole new one, whenever the process dies.
/// @throws std::system_error with the name of the file (a full disk, no permission)
void write_file_with(const std::filesystem::path& path, const std::function<void(int fd)>& write);
void write_file(const std::filesystem::path& path, std::string_view content);

/// All of `content` to a descriptor. @throws std::system_error
void write_all(int fd, const char* data, std::size_t size);

/// Makes the names in a folder durable (after renames and removals).
void sync_folder(const std::filesystem::path& folder);

}  // namespace mergex::io
