#include "routing/fused_curvature.h"

#include <torch/torch.h>

#include "kernels/kronecker.h"
#include "tensor/parallel.h"

namespace mergex::routing {
namespace {

const std::uint8_t* bytes_of(const Tensor& mask) {
  if (!mask.defined()) return nullptr;
  TORCH_CHECK(mask.scalar_type() == at::kBool && mask.is_contiguous(), "a mask is a contiguous bool tensor");
  return reinterpret_cast<const std::uint8_t*>(mask.const_data_ptr<bool>());
}

/// All tensors contiguous, float32 or float64, on the CPU.
struct Problem {
  Tensor experts_NOI, base_OI, before_NOI, after_NOI, c1_out, c2_out, c1_in, c2_in;
  double scale;

  template <class T>
  kernels::Kronecker<T> kernel() const {
    return {.rank = c1_out.size(0),
            .num_experts = experts_NOI.size(0),
            .a1 = c1_out.size(-1),
            .a2 = c2_out.size(-1),
            .b1 = c1_in.size(-1),
            .b2 = c2_in.size(-1),
            .c1_out = c1_out.const_data_ptr<T>(),
            .c2_out = c2_out.const_data_ptr<T>(),
            .c1_in = c1_in.const_data_ptr<T>(),
            .c2_in = c2_in.const_data_ptr<T>(),
            .experts = experts_NOI.const_data_ptr<T>(),
            .base = base_OI.const_data_ptr<T>(),
            .keep_before = bytes_of(before_NOI),
            .keep_after = bytes_of(after_NOI),
            .scale = static_cast<T>(scale),
            .vectors = kernels::vector_kernels<T>(),
            .parallel = tensor::parallel_for};
  }
};

struct FusedCurvature : torch::autograd::Function<FusedCurvature> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& experts, const Tensor& base,
                        const CurvatureMasks& masks, double scale, const Tensor& c1_out, const Tensor& c2_out,
                        const Tensor& c1_in, const Tensor& c2_in) {
    const auto &before = masks.before_NOI, &after = masks.after_NOI;
    context->save_for_backward({experts, base, before, after, c1_out, c2_out, c1_in, c2_in});
    context->saved_data["scale"] = scale;
    const Problem p{experts, base, before, after, c1_out, c2_out, c1_in, c2_in, scale};
    auto gamma = torch::empty_like(experts);
    AT_DISPATCH_FLOATING_TYPES(gamma.scalar_type(), "fused_curvature",
                               [&] { p.kernel<scalar_t>().forward(gamma.mutable_data_ptr<scalar_t>()); });
    return gamma;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list upstream) {
    const auto saved = context->get_saved_variables();
    const Problem p{saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6], saved[7],
                    context->saved_data["scale"].toDouble()};
    TORCH_CHECK(!at::GradMode::is_enabled(), "fused_curvature has no second derivative");
    const auto g = upstream[0].contiguous();
    auto experts = torch::empty_like(p.experts_NOI), base = torch::empty_like(p.base_OI);
    auto c1_out = torch::empty_like(p.c1_out), c2_out = torch::empty_like(p.c2_out);
    auto c1_in = torch::empty_like(p.c1_in), c2_in = torch::empty_like(p.c2_in);
    AT_DISPATCH_FLOATING_TYPES(g.scalar_type(), "fused_curvature", [&] {
      p.kernel<scalar_t>().backward(
          g.const_data_ptr<scalar_t>(),
          {experts.mutable_data_ptr<scalar_t>(), base.mutable_data_ptr<scalar_t>(), c1_out.mutable_data_ptr<scalar_t>(),
           c2_out.mutable_data_ptr<scalar_t>(), c1_in.mutable_data_ptr<scalar_t>(), c2_in.mutable_data_ptr<scalar_t>()});
    });
    return {experts, base, {}, {}, c1_out, c2_out, c1_in, c2_in};
  }
};

}  // namespace

bool can_fuse_curvature(const Tensor& experts_NOI) {
  return experts_NOI.is_cpu() && (experts_NOI.scalar_type() == at::kFloat || experts_NOI.scalar_type() == at::kDouble);
}

Tensor fused_curvature(const Tensor& experts_NOI, const Tensor& base_OI, const CurvatureMasks& masks, double scale,
                       const Tensor& c1_out, const Tensor& c2_out, const Tensor& c1_in, const Tensor& c2_in) {
  const auto n = experts_NOI.size(0);
  TORCH_CHECK(base_OI.sizes() == experts_NOI.sizes().slice(1), "the base is ", base_OI.sizes());
  TORCH_CHECK(c1_out.size(-1) * c2_out.size(-1) == experts_NOI.size(1) &&
                  c1_in.size(-1) * c2_in.size(-1) == experts_NOI.size(2),
              "the factors do not fit experts ", experts_NOI.sizes());
  for (const auto* c : {&c1_out, &c2_out, &c1_in, &c2_in}) {
    TORCH_CHECK(c->sizes() == at::IntArrayRef({c1_out.size(0), n, c->size(-1), c->size(-1)}), "a factor is ", c->sizes());
  }
  for (const auto* mask : {&masks.before_NOI, &masks.after_NOI}) {
    TORCH_CHECK(!mask->defined() || mask->sizes() == experts_NOI.sizes(), "a mask is ", mask->sizes());
  }
  return FusedCurvature::apply(experts_NOI.contiguous(), base_OI.contiguous(), masks, scale, c1_out.contiguous(), c2_out.contiguous(), c1_in.contiguous(), c2_in.contiguous());
}

}  // namespace mergex::routing
