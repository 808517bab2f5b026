#include "fuzz/coverage.h"

#include <cstdint>

namespace mergex::fuzz {
namespace {

constexpr std::uint64_t kNumSlots = 1 << 18;
bool seen[kNumSlots];
bool is_new = false;
std::uintptr_t previous = 0;

}  // namespace

bool reached_new_code() {
  const bool result = is_new;
  is_new = false;
  return result;
}

}  // namespace mergex::fuzz

/// GCC's -fsanitize-coverage=trace-pc calls this in every basic block. Steps from block to block are what is counted;
/// relative to this function, so that they are the same wherever the program is loaded.
extern "C" __attribute__((no_sanitize_coverage, no_sanitize("address", "undefined"))) void __sanitizer_cov_trace_pc();
extern "C" void __sanitizer_cov_trace_pc() {
  using namespace mergex::fuzz;
  const auto here = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0)) -
                    reinterpret_cast<std::uintptr_t>(&__sanitizer_cov_trace_pc);
  const auto slot = (here ^ (previous << 5)) % kNumSlots;
  previous = here;
  if (seen[slot]) return;
  seen[slot] = true;
  is_new = true;
}
