#pragma once

#include <cstdint>
#include <vector>

namespace mergex::kernels {

/// Memory that a thread keeps from call to call: fresh pages cost more than the work on them. Its content is lost.
template <class T>
T* scratch(std::vector<T>& memory, std::int64_t entries) {
  if (static_cast<std::int64_t>(memory.size()) < entries) memory = std::vector<T>(static_cast<std::size_t>(entries));
  return memory.data();
}

}  // namespace mergex::kernels
