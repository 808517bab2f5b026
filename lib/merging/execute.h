#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include "merging/plan.h"
namespace mergex::merging {
struct ExecuteOptions {
  std::filesystem::path out;
  std::uint64_t shard_bytes = 5'000'000'000, memory_bytes = 512u << 20;
  std::size_t threads = 1;
  bool resume = false, overwrite = false;
  std::function<void(std::uint64_t, std::uint64_t, std::string_view)> progress = {};
};
struct Executed { std::uint64_t bytes = 0; double seconds = 0; };
void check_output(const std::filesystem::path& out, bool resume, bool overwrite);
Executed execute(const MergePlan& plan, const ExecuteOptions& options);
}
