#include "tensor/block_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <unordered_map>

namespace mergex::tensor {
namespace {

constexpr std::size_t kSmallest = std::size_t{1} << 20, kRounding = std::size_t{1} << 18, kHugePage = std::size_t{2} << 20;

/// A mapping whose address is a multiple of the size of a huge page; null when there is no memory.
void* map_block(std::size_t bytes) {
  const auto room = bytes + kHugePage;
  void* raw = ::mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto* begin = static_cast<char*>(raw);
  const auto skipped = (kHugePage - reinterpret_cast<std::uintptr_t>(begin) % kHugePage) % kHugePage;
  if (skipped > 0) ::munmap(begin, skipped);
  ::munmap(begin + skipped + bytes, room - skipped - bytes);
  ::madvise(begin + skipped, bytes, MADV_HUGEPAGE);  // a wish: without it everything works, slower
  return begin + skipped;
}

class BlockAllocator final : public c10::Allocator {
 public:
  explicit BlockAllocator(c10::Allocator& small) : small_(small) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    // Freed by `release` too: LibTorch also frees memory by `raw_deleter` alone, whatever its size.
    void* block = bytes < kSmallest ? small_.allocate(bytes).release_context()
                                    : take((bytes + kRounding - 1) / kRounding * kRounding);
    return {block, block, release, at::Device(at::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  struct Kept {
    std::size_t bytes;
    void* block;
  };

  void* take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    void* block = nullptr;
    const auto fitting = by_size_.lower_bound(bytes);
    if (fitting != by_size_.end() && fitting->first <= bytes + bytes / 8) {
      block = fitting->second->block;
      bytes = fitting->first;
      forget(fitting);
    } else if ((block = map_block(bytes)) == nullptr) {
      shrink_to(0);
      if ((block = map_block(bytes)) == nullptr) throw std::bad_alloc();
    }
    sizes_.emplace(block, bytes);
    in_use_ += bytes;
    peak_ = std::max(peak_, in_use_);
    shrink_to(peak_ + peak_ / 8);
    return block;
  }

  static void release(void* block);

  void keep(void* block) {
    const std::lock_guard lock(mutex_);
    const auto found = sizes_.find(block);
    if (found == sizes_.end()) {
      small_.raw_deleter()(block);
      return;
    }
    const auto bytes = found->second;
    sizes_.erase(found);
    in_use_ -= bytes;
    by_age_.push_back({bytes, block});
    by_size_.emplace(bytes, std::prev(by_age_.end()));
    kept_ += bytes;
    shrink_to(peak_ + peak_ / 8);
  }

  void forget(std::multimap<std::size_t, std::list<Kept>::iterator>::iterator entry) {
    kept_ -= entry->first;
    by_age_.erase(entry->second);
    by_size_.erase(entry);
  }

  /// Gives kept blocks back until they and those in use are no more than `bytes`.
  void shrink_to(std::size_t bytes) {
    while (kept_ > 0 && in_use_ + kept_ > bytes) {
      const auto oldest = by_age_.front();
      auto entry = by_size_.lower_bound(oldest.bytes);
      while (entry->second->block != oldest.block) ++entry;
      forget(entry);
      ::munmap(oldest.block, oldest.bytes);
    }
  }

  c10::Allocator& small_;
  std::mutex mutex_;
  std::unordered_map<void*, std::size_t> sizes_;  // of the blocks in use
  std::list<Kept> by_age_;                        // the oldest first
  std::multimap<std::size_t, std::list<Kept>::iterator> by_size_;
  std::size_t in_use_ = 0, kept_ = 0, peak_ = 0;
};

BlockAllocator& allocator() {
  // Never destroyed: tensors in static storage may be freed after it would be.
  static auto* instance = new BlockAllocator(*c10::GetDefaultCPUAllocator());
  return *instance;
}

void BlockAllocator::release(void* block) { allocator().keep(block); }

}  // namespace

void use_block_allocator() { c10::SetCPUAllocator(&allocator(), /*priority=*/100); }

}  // namespace mergex::tensor
