#pragma once

#include <filesystem>
#include <string_view>

#include "io/file_descriptor.h"

namespace mergex::merging {

inline constexpr std::string_view kJournalFile = "journal.jsonl";

/// Absolute, without a slash at the end, through links: what is renamed is the folder itself.
std::filesystem::path resolved_output(const std::filesystem::path& out);

/// `OUT.partial`, where a result is made. @param out  resolved
std::filesystem::path partial_folder(const std::filesystem::path& out);

/// Whether a result may be written there. @throws UserError for a folder that is not empty without `overwrite` or
/// `resume`, for one that `overwrite` would destroy though it is no model, and for the rest of an interrupted merge
/// without either
void check_output(const std::filesystem::path& out, bool resume, bool overwrite);

/// A folder that appears whole or not at all: it is made under another name beside its own, synced and renamed.
/// What is there already is replaced by the same rename. Unless it is published or kept, it is removed.
class OutputFolder {
 public:
  /// @param keeps  what an interrupted merge left
  /// @throws UserError when the folder cannot be made or another process works on it
  OutputFolder(const std::filesystem::path& out, bool keeps);
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  const std::filesystem::path& path() const { return partial_; }
  /// @param name  relative; folders of it are made
  void write_file(const std::filesystem::path& name, std::string_view content) const;
  void copy_file(const std::filesystem::path& from, const std::filesystem::path& name) const;

  /// What is in it is worth resuming, or is not.
  void keep() { is_kept_ = true; }
  void discard() { is_kept_ = false; }
  bool is_kept() const { return is_kept_; }
  /// From here on the result is there, whatever happens. @throws std::system_error
  void publish();

 private:
  std::filesystem::path out_, partial_;
  std::filesystem::path first_created_;  // the outermost of the parents that were made, or empty
  io::FileDescriptor lock_;
  bool is_kept_ = false, is_published_ = false;
};

}  // namespace mergex::merging
