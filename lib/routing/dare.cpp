#include "routing/dare.h"

#include <torch/torch.h>

#include "tensor/random_mask.h"

namespace mergex::routing {

EntryMask dare_mask(const Tensor& dropped, double p, at::Generator& generator) {
  auto mask = tensor::draw_mask(dropped.sizes(), p, dropped.device(), generator);
  return {std::move(mask.keep), mask.scale};
}

constinit const Protocol kDare{
    .name = "dare",
    .summary = "while training, drop entries of the task vectors at random and rescale the rest; evaluation keeps all",
    .paper = "Yu et al. 2024, arXiv:2311.03099; inside a layer: Nguyen et al. 2025, arXiv:2502.18821",
    .configure = [](io::JsonObject& options, Profile profile) -> Masks {
      double p = 0.1;
      options.optional("dare_p", p, {.at_least = 0.0, .below = 1.0});
      const std::vector<std::string> modes{"elementwise", "expert_channel"};
      const bool whole_experts = options.choice("dare_mode", modes, profile == Profile::kRelease ? 1 : 0) == 1;
      if (p == 0.0) return {};
      if (whole_experts) {
        return {.units = [p](const Tensor& scores_UN, tensor::RandomStreams& random) {
          const auto mask = dare_mask(scores_UN, p, random.stream("dare"));
          return mask.keep_NOI.to(scores_UN.scalar_type()) * mask.scale;
        }};
      }
      return {.entries = [p](const Tensor& experts_NOI, const Tensor&, bool training, tensor::RandomStreams* random) {
        return training ? dare_mask(experts_NOI, p, random->stream("dare")) : EntryMask();
      }};
    }};

}  // namespace mergex::routing
