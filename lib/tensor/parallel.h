#pragma once

#include <cstdint>
#include <functional>

namespace mergex::tensor {

/// Calls `body` on sub-ranges that together are [0, count), in LibTorch's pool of threads.
void parallel_for(std::int64_t count, const std::function<void(std::int64_t begin, std::int64_t end)>& body);

}  // namespace mergex::tensor
