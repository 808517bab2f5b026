#include "nn/feed_forward.h"

#include <torch/torch.h>

namespace mergex::nn {

void FeedForward::replace_projection(const std::string& name, std::shared_ptr<Projection> replacement) {
  replace_module(name, replacement);
  projection(name) = std::move(replacement);
}

}  // namespace mergex::nn
