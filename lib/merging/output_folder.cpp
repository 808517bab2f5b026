#include "merging/output_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <vector>

#include "core/error.h"
#include "io/atomic_file.h"

namespace mergex::merging {
namespace fs = std::filesystem;
namespace {

bool is_filled_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored) && !fs::is_empty(path, ignored);
}

// --overwrite replaces models, not whatever folder a slip of the hand has named.
bool looks_like_model(const fs::path& folder) {
  if (fs::exists(folder / "manifest.json")) return true;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") return true;
  }
  return false;
}

// Says that a folder is the rest of a merge and not somebody's.
constexpr const char* kMark = "unfinished-merge";

// The mark goes before the rename; what was written last is there by then.
bool is_ours(const fs::path& partial) {
  std::error_code ignored;
  return fs::exists(partial / kMark, ignored) || fs::exists(partial / "manifest.json", ignored);
}

// The first line is the plan's.
bool is_worth_resuming(const fs::path& journal) {
  std::error_code ignored;
  if (!fs::exists(journal, ignored)) return false;
  const auto lines = io::read_file(journal);
  return std::ranges::count(lines, '\n') > 1;
}

// Without its journal nothing can be taken for the rest of an interrupted merge: it goes first.
void remove_folder(const fs::path& folder) {
  std::error_code ignored;
  fs::remove(folder / kJournalFile, ignored);
  fs::remove_all(folder, ignored);
}

/// Everything below a folder, and its names. All files are on their way before the first is waited for, so that a file
/// system with a journal needs one commit, not one per file.
void sync_tree(const fs::path& folder) {
  std::vector<io::FileDescriptor> files;
  std::vector<fs::path> folders{folder};
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_directory()) {
      folders.push_back(entry.path());
    } else {
      files.emplace_back(entry.path(), O_RDONLY);
    }
  }
  for (const auto& file : files) (void)::sync_file_range(file.fd(), 0, 0, SYNC_FILE_RANGE_WRITE);
  for (const auto& file : files) file.sync();
  for (const auto& path : folders) io::sync_folder(path);
}

}  // namespace

fs::path resolved_output(const fs::path& out) {
  const auto path = fs::weakly_canonical(fs::absolute(out));
  return path.has_filename() ? path : path.parent_path();
}

fs::path partial_folder(const fs::path& out) { return out.string() + ".partial"; }

void check_output(const fs::path& given, bool resume, bool overwrite) {
  const auto out = resolved_output(given);
  std::error_code ignored;
  if (fs::is_symlink(given, ignored) && !fs::exists(given, ignored))
    fail("{}: is a link to nothing; remove it, or choose another --out", given.string());
  if (const auto here = fs::current_path(ignored); overwrite && !here.empty() && fs::exists(out, ignored)) {
    const auto below = here.lexically_relative(out);
    if (!below.empty() && *below.begin() != "..")
      fail("{}: --overwrite would remove the working directory; choose another --out", out.string());
  }
  if (fs::exists(out, ignored) && !fs::is_directory(out, ignored))
    fail("{}: is a file, expected a folder; choose another --out", out.string());
  if (is_filled_folder(out)) {
    if (!resume && !overwrite)
      fail("{}: is not empty; choose another --out, or replace what is there by --overwrite", out.string());
    if (overwrite && !looks_like_model(out)) {
      fail("{}: is not empty and holds no model, so --overwrite does not replace it; choose another --out",
           out.string());
    }
  }
  if (const auto partial = partial_folder(out); is_filled_folder(partial) && !is_ours(partial)) {
    fail("{}: is not the rest of a merge, and a merge into {} needs the name; move it away, or choose another --out",
         partial.string(), out.filename().string());
  }
  if (const auto partial = partial_folder(out); !resume && !overwrite && is_worth_resuming(partial / kJournalFile)) {
    fail("{}: holds an unfinished merge; continue it by --resume, or start again by --overwrite", partial.string());
  }
}

OutputFolder::OutputFolder(const fs::path& out, bool keeps)
    : out_(resolved_output(out)), partial_(partial_folder(out_)) {
  try {
    for (auto parent = out_.parent_path(); !parent.empty() && !fs::exists(parent); parent = parent.parent_path()) {
      first_created_ = parent;
    }
    fs::create_directories(partial_);
    lock_ = io::FileDescriptor(partial_, O_RDONLY | O_DIRECTORY);
    if (::flock(lock_.fd(), LOCK_EX | LOCK_NB) != 0)
      fail("{}: another merge is writing to it; wait for it, or choose another --out", partial_.string());
    if (!keeps) {
      fs::remove(partial_ / kJournalFile);
      for (const auto& entry : fs::directory_iterator(partial_)) {
        if (entry.path().filename() != kMark) fs::remove_all(entry.path());
      }
    }
    const io::FileDescriptor mark(partial_ / kMark, O_WRONLY | O_CREAT);
  } catch (const std::system_error& error) {
    if (error.code() == std::errc::no_space_on_device) throw;
    fail("{}: cannot be created: {}; choose another --out", out_.string(), error.code().message());
  }
}

OutputFolder::~OutputFolder() {
  if (is_kept_ || is_published_) return;
  remove_folder(partial_);
  std::error_code ignored;  // the parents go, too, unless somebody else uses them by now
  for (auto parent = out_.parent_path(); !first_created_.empty(); parent = parent.parent_path()) {
    if (!fs::remove(parent, ignored) || parent == first_created_) break;
  }
}

void OutputFolder::write_file(const fs::path& name, std::string_view content) const {
  fs::create_directories((partial_ / name).parent_path());
  const io::FileDescriptor file(partial_ / name, O_WRONLY | O_CREAT | O_TRUNC);
  file.write_at(0, std::as_bytes(std::span(content)));
}

void OutputFolder::copy_file(const fs::path& from, const fs::path& name) const {
  fs::create_directories((partial_ / name).parent_path());
  fs::copy_file(from, partial_ / name, fs::copy_options::overwrite_existing);
}

void OutputFolder::publish() {
  fs::remove(partial_ / kJournalFile);
  fs::remove(partial_ / kMark);
  sync_tree(partial_);
  const auto fail_to_rename = [&] {
    throw std::system_error(errno, std::generic_category(),
                            fmt::format("{}: cannot be renamed to {}", partial_.string(), out_.string()));
  };
  if (!is_filled_folder(out_)) {
    if (::rename(partial_.c_str(), out_.c_str()) != 0) fail_to_rename();
    is_published_ = true;
  } else if (const io::FileDescriptor mark(out_ / kMark, O_WRONLY | O_CREAT);  // it is what is left over, from here on
             ::renameat2(AT_FDCWD, partial_.c_str(), AT_FDCWD, out_.c_str(), RENAME_EXCHANGE) == 0) {
    is_published_ = true;
    remove_folder(partial_);  // now the old one
  } else {
    if (errno != EINVAL && errno != ENOSYS) fail_to_rename();
    const fs::path old = out_.string() + ".old";  // a file system that cannot exchange
    if (::rename(out_.c_str(), old.c_str()) != 0 || ::rename(partial_.c_str(), out_.c_str()) != 0) fail_to_rename();
    is_published_ = true;
    remove_folder(old);
  }
  io::sync_folder(out_.parent_path());
}

}  // namespace mergex::merging
