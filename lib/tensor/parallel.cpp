#include "tensor/parallel.h"

#include <ATen/Parallel.h>

namespace mergex::tensor {

// at::parallel_for is a template whose OpenMP region is compiled where it is called: this source alone has OpenMP
// switched on, and elsewhere the call would run on one thread without a word.
void parallel_for(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body) {
  at::parallel_for(0, count, /*grain_size=*/1, body);
}

}  // namespace mergex::tensor
