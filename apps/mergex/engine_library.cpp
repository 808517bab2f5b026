#include "engine_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>

namespace mergex {

int run_in_engine(const CommandOptions& options) {
  namespace fs = std::filesystem;
  // Read when LibTorch's OpenMP is loaded. Its threads otherwise spin for milliseconds while they wait for each other,
  // which on a machine with other work halves the speed of small models; a short spin costs nothing on a quiet one.
  setenv("GOMP_SPINCOUNT", "10000", /*overwrite=*/0);
  const auto folder = fs::read_symlink("/proc/self/exe").parent_path();
  std::string problems;
  for (const auto& candidate : {folder / "libmergex_engine.so", folder / "../lib/libmergex_engine.so"}) {
    if (!fs::exists(candidate)) continue;
    void* library = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      problems = dlerror();
      continue;
    }
    auto* run = reinterpret_cast<decltype(&mergex_engine_run)>(dlsym(library, "mergex_engine_run"));
    if (run == nullptr) throw std::runtime_error(candidate.string() + ": has no entry; it belongs to another build");
    return run(&options);
  }
  throw std::runtime_error(problems.empty() ? "libmergex_engine.so is not beside the program; install or build it again"
                                            : "the engine does not load: " + problems);
}

}  // namespace mergex
