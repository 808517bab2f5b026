#include "routing/ties.h"

#include <torch/torch.h>

#include <cmath>

#include "routing/protocol.h"

namespace mergex::routing {

Tensor ties_mask(const Tensor& task_vectors_NOI, double density) {
  const torch::NoGradGuard no_grad;
  auto trimmed_NOI = task_vectors_NOI.detach();
  Tensor kept_NOI;
  if (density < 1.0) {
    const auto size = trimmed_NOI[0].numel();
    // 0.29 * 100 is 28.999... in binary: the small lift keeps the floor that the decimal number means.
    const auto count = static_cast<std::int64_t>(std::floor(density * static_cast<double>(size) + 1e-9));
    const auto magnitude_NM = trimmed_NOI.abs().flatten(1);
    const auto order_NM = std::get<1>(torch::sort(magnitude_NM, /*stable=*/true, /*dim=*/1, /*descending=*/true));
    kept_NOI = torch::zeros_like(magnitude_NM, at::kBool)
                   .scatter_(1, order_NM.slice(1, 0, count), true)
                   .view_as(trimmed_NOI);
    trimmed_NOI = trimmed_NOI * kept_NOI;
  }
  const auto elected_1OI = torch::sign(trimmed_NOI.sum(0, /*keepdim=*/true));
  auto mask_NOI = torch::sign(trimmed_NOI) == elected_1OI;
  if (kept_NOI.defined()) mask_NOI = mask_NOI & kept_NOI;
  return mask_NOI.to(task_vectors_NOI.scalar_type());
}

constinit const Protocol kTies{
    .name = "ties",
    .summary = "keep the entries of each task vector that agree with the elected sign",
    .paper = "Yadav et al. 2023, arXiv:2306.01708; inside a layer: Nguyen et al. 2025, arXiv:2502.18821",
    .configure = [](io::JsonObject& options, Profile) -> Masks {
      double density = 1.0;
      options.optional("ties_density", density, {.above = 0.0, .at_most = 1.0});
      return {.entries = [density](const Tensor& tau_NOI, bool, tensor::RandomStreams*) {
        return ties_mask(tau_NOI, density);
      }};
    }};

}  // namespace mergex::routing
