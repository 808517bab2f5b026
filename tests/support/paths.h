#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

namespace mergex::test {

/// Folder of the golden cases of one kind ("models", "camex"): `$MERGEX_GOLDEN_DIR/<kind>` where that variable is
/// set, else tests/golden/<kind>. Absent when the folder does not exist there (said in one line).
std::optional<std::filesystem::path> golden_folder(const std::string& kind);
/// A single golden file ("statistics.json"), found the same way.
std::optional<std::filesystem::path> golden_file(const std::string& name);

/// A real data set or tokenizer ("glue/RTE/dev.tsv") in `$MERGEX_DATA_DIR`, else in ../shared/data beside the
/// checkout. Absent ones are said in one line, and the test that wants them returns.
std::optional<std::filesystem::path> data_path(const std::string& name);

/// Whether a page of docs/ names a registry's entry, in backquotes.
bool is_documented(const std::string& name);

/// An empty folder that is removed at the end of the scope.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

/// Writes a small file for a test and returns its path.
std::filesystem::path write_text(const std::filesystem::path& path, const std::string& content);

/// Text of the UserError that `action` throws; fails the test when it throws none.
std::string user_error(const std::function<void()>& action);

/// One line per golden case, printed and appended to golden.log in the build folder:
/// `golden camex/merged_ties_ca_3: ok, largest error 3e-13`.
void log_golden(const std::string& id, const std::string& verdict);

}  // namespace mergex::test
