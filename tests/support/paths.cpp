#include "support/paths.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "core/error.h"
#include "support/catch.h"

namespace mergex::test {
namespace fs = std::filesystem;
namespace {

std::optional<fs::path> existing(const fs::path& path, const char* what) {
  if (fs::exists(path)) return path;
  fmt::print("{}: {} is not there, skipped\n", what, path.string());
  return std::nullopt;
}

fs::path golden_root() {
  if (const char* dir = std::getenv("MERGEX_GOLDEN_DIR"); dir != nullptr && *dir != '\0') return dir;
  return fs::path(MERGEX_SOURCE_DIR) / "tests/golden";
}

}  // namespace

std::optional<fs::path> golden_folder(const std::string& kind) { return existing(golden_root() / kind, "golden"); }
std::optional<fs::path> golden_file(const std::string& name) { return existing(golden_root() / name, "golden"); }

std::optional<fs::path> data_path(const std::string& name) {
  const char* dir = std::getenv("MERGEX_DATA_DIR");
  const fs::path root = dir != nullptr && *dir != '\0' ? fs::path(dir) : fs::path(MERGEX_SOURCE_DIR) / "../shared/data";
  return existing((root / name).lexically_normal(), "data");
}

bool is_documented(const std::string& name) {
  for (const auto& entry : fs::directory_iterator(fs::path(MERGEX_SOURCE_DIR) / "docs")) {
    if (entry.path().extension() != ".md") continue;
    std::ifstream in(entry.path());
    const std::string page{std::istreambuf_iterator<char>(in), {}};
    if (page.find("`" + name + "`") != std::string::npos) return true;
  }
  return false;
}

TemporaryFolder::TemporaryFolder() {
  std::string pattern = (fs::temp_directory_path() / "mergex-test-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make a temporary folder");
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

fs::path write_text(const fs::path& path, const std::string& content) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << content;
  return path;
}

std::string user_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const UserError& error) {
    return error.what();
  }
  FAIL("no UserError was thrown");
  return {};
}

void log_golden(const std::string& id, const std::string& verdict) {
  const auto line = fmt::format("golden {}: {}\n", id, verdict);
  fmt::print("{}", line);
  std::ofstream(fs::path(MERGEX_BINARY_DIR) / "golden.log", std::ios::app) << line;
}

}  // namespace mergex::test
