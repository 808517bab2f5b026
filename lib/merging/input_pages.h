#pragma once

#include <cstddef>
#include <span>

#include "io/checkpoint_folder.h"

namespace mergex::merging {

/// Asks for a mapped range to be read into memory, without waiting for it.
void prefetch(std::span<const std::byte> mapped);
/// Takes a range out of this process's memory; looking at it again reads it from its file again. Only for mapped files:
/// what lies elsewhere would be lost.
void release(std::span<const std::byte> mapped);

/// While one lives, a page of a mapped file that cannot be read (the file was truncated meanwhile, the disk has a
/// fault) reads as zeros and is remembered, instead of ending the process by SIGBUS. One at a time.
class UnreadablePageGuard {
 public:
  UnreadablePageGuard();
  ~UnreadablePageGuard();
  UnreadablePageGuard(const UnreadablePageGuard&) = delete;
  UnreadablePageGuard& operator=(const UnreadablePageGuard&) = delete;

  /// @throws std::system_error that names the file and the tensor, once a page could not be read
  void check(std::span<const io::CheckpointFolder* const> inputs) const;
};

}  // namespace mergex::merging
