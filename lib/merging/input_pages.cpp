#include "merging/input_pages.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <stdexcept>
#include <system_error>

namespace mergex::merging {
namespace {

constexpr std::size_t kWorthACall = 64 << 10;

const auto page_size = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));

void advise(std::span<const std::byte> mapped, int advice) {
  if (mapped.size() < kWorthACall) return;
  const auto address = reinterpret_cast<std::uintptr_t>(mapped.data());
  const auto begin = address / page_size * page_size;
  // Advice that a system does not follow costs speed, nothing else.
  (void)::madvise(reinterpret_cast<void*>(begin), address + mapped.size() - begin, advice);
}

std::atomic<std::uintptr_t> unreadable{0};
struct sigaction previous_action;

void on_bus_error(int signal, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  void* const page = reinterpret_cast<void*>(address / page_size * page_size);
  if (address == 0 ||
      ::mmap(page, page_size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
    ::sigaction(SIGBUS, &previous_action, nullptr);
    ::raise(signal);
    return;
  }
  std::uintptr_t none = 0;
  unreadable.compare_exchange_strong(none, address);
}

}  // namespace

void prefetch(std::span<const std::byte> mapped) { advise(mapped, MADV_WILLNEED); }
void release(std::span<const std::byte> mapped) { advise(mapped, MADV_DONTNEED); }

UnreadablePageGuard::UnreadablePageGuard() {
  unreadable = 0;
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  if (::sigaction(SIGBUS, &action, &previous_action) != 0) {
    throw std::system_error(errno, std::generic_category(), "sigaction");
  }
}

UnreadablePageGuard::~UnreadablePageGuard() { ::sigaction(SIGBUS, &previous_action, nullptr); }

void UnreadablePageGuard::check(std::span<const io::CheckpointFolder* const> inputs) const {
  const auto address = unreadable.load();
  if (address == 0) return;
  for (const auto* folder : inputs) {
    for (const auto* tensor : folder->tensors()) {
      const auto begin = reinterpret_cast<std::uintptr_t>(tensor->bytes.data());
      if (address < begin || address >= begin + tensor->bytes.size()) continue;
      throw std::system_error(
          EIO, std::generic_category(),
          fmt::format("{}: tensor \"{}\" cannot be read (truncated meanwhile, or a fault of the disk)",
                      folder->file_of(tensor->name), tensor->name));
    }
  }
  throw std::system_error(EIO, std::generic_category(),
                          "an input cannot be read (truncated meanwhile, or a fault of the disk)");
}

}  // namespace mergex::merging
