#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "io/json.h"
#include "tasks/encode.h"
#include "tasks/task.h"

namespace mergex::tasks {

/// A task's data as the model reads it.
struct EncodedData {
  Data data;  ///< the splits' examples are empty: what is needed of them is in the encoded ones
  std::vector<Encoded> train;
  std::vector<std::vector<Encoded>> validation;  ///< as data.validation
};

/// SHA-256 of all that encoded data follow from: the options, the names and contents of the files, the tokenizer's
/// file, and the version of the format that is written here.
/// @param options  the resolved `task` section
std::string encoded_data_key(const io::Json& options, std::span<const InputFile> files,
                             const std::filesystem::path& tokenizer_file);

/// Writes a file that `read_encoded_data` reads. It appears whole or not at all, also when several processes write it.
/// @throws std::exception when it cannot be written
void write_encoded_data(const std::filesystem::path& path, const EncodedData& encoded);

/// @param files       what `encoded_data_key` was given: names and places of the splits
/// @param vocab_size  ids must be below it
/// @throws UserError for a file that is missing, cut off, changed or of another format
EncodedData read_encoded_data(const std::filesystem::path& path, std::span<const InputFile> files,
                              std::int64_t vocab_size);

/// The checksum that such a file must carry, from its other content. For tests that damage one on purpose.
std::string encoded_data_checksum(const std::filesystem::path& path);

}  // namespace mergex::tasks
