#include "routing/ties.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "kernels/vector_kernels.h"
#include "routing/protocol.h"
#include "tensor/parallel.h"

namespace mergex::routing {

namespace {

/// `ties_mask` without trimming, from experts and base at once.
Tensor untrimmed_mask(const Tensor& experts_NOI, const Tensor& base_OI) {
  const auto size = base_OI.numel();
  auto keep_NOI = torch::empty(experts_NOI.sizes(), at::kBool);
  AT_DISPATCH_FLOATING_TYPES(base_OI.scalar_type(), "ties_mask", [&] {
    const auto* vectors = kernels::vector_kernels<scalar_t>();
    const auto* experts = experts_NOI.const_data_ptr<scalar_t>();
    const auto* base = base_OI.const_data_ptr<scalar_t>();
    auto* keep = reinterpret_cast<std::uint8_t*>(keep_NOI.mutable_data_ptr<bool>());
    constexpr std::int64_t kPiece = 16 * 1024;
    tensor::parallel_for((size + kPiece - 1) / kPiece, [&](std::int64_t begin, std::int64_t end) {
      const auto at = begin * kPiece;
      vectors->elect_signs(std::min(end * kPiece, size) - at, experts_NOI.size(0), experts + at, size, base + at,
                           keep + at, size);
    });
  });
  return keep_NOI;
}

bool has_kernel(const Tensor& t) {
  return t.is_cpu() && t.is_contiguous() && (t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble);
}

}  // namespace

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
  return mask_NOI;
}

Tensor ties_mask(const Tensor& experts_NOI, const Tensor& base_OI, double density) {
  const torch::NoGradGuard no_grad;
  if (density == 1.0 && has_kernel(experts_NOI) && has_kernel(base_OI)) return untrimmed_mask(experts_NOI, base_OI);
  return ties_mask(experts_NOI - base_OI, density);
}

constinit const Protocol kTies{
    .name = "ties",
    .summary = "keep the entries of each task vector that agree with the elected sign",
    .paper = "Yadav et al. 2023, arXiv:2306.01708; inside a layer: Nguyen et al. 2025, arXiv:2502.18821",
    .configure = [](io::JsonObject& options, Profile) -> Masks {
      double density = 1.0;
      options.optional("ties_density", density, {.above = 0.0, .at_most = 1.0});
      return {.entries = [density](const Tensor& experts_NOI, const Tensor& base_OI, bool, tensor::RandomStreams*) {
        return ties_mask(experts_NOI, base_OI, density);
      }};
    }};

}  // namespace mergex::routing
