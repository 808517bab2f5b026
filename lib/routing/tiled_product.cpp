#include "routing/tiled_product.h"

#include <torch/torch.h>

#include "kernels/merged_product.h"
#include "tensor/parallel.h"

namespace mergex::routing {
namespace {

/// All tensors contiguous and of one type.
template <class T>
kernels::MergedProduct<T> kernel(const Tensor& x, const Tensor& terms, const Tensor& base, const Tensor& scores) {
  return {.num_sentences = x.size(0),
          .num_tokens = x.size(1),
          .num_terms = terms.size(0),
          .out_features = terms.size(1),
          .in_features = terms.size(2),
          .x = x.const_data_ptr<T>(),
          .terms = terms.const_data_ptr<T>(),
          .base = base.defined() ? base.const_data_ptr<T>() : nullptr,
          .scores = scores.const_data_ptr<T>(),
          .vectors = kernels::vector_kernels<T>(),
          .parallel = tensor::parallel_for};
}

struct TiledProduct : torch::autograd::Function<TiledProduct> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& terms,
                        const std::optional<Tensor>& maybe_base, const Tensor& scores) {
    const auto base = maybe_base.value_or(Tensor());
    context->save_for_backward({x, terms, base, scores});
    auto y = torch::empty({x.size(0), x.size(1), terms.size(1)}, x.options().requires_grad(false));
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "tiled_product", [&] {
      const auto product = kernel<scalar_t>(x, terms, base, scores);
      auto work_space = torch::empty({x.size(0) * x.size(2) * product.padded_tokens()}, y.options());
      product.forward(y.mutable_data_ptr<scalar_t>(), work_space.template mutable_data_ptr<scalar_t>());
    });
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list upstream) {
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &terms = saved[1], &base = saved[2], &scores = saved[3];
    TORCH_CHECK(!at::GradMode::is_enabled(), "tiled_product has no second derivative");
    const auto dy = upstream[0].contiguous();
    auto dx = context->needs_input_grad(0) ? torch::empty_like(x) : Tensor();
    auto dbase = base.defined() && base.requires_grad() ? torch::empty_like(base) : Tensor();
    auto dscores = torch::empty_like(scores);
    auto leaf = terms.is_leaf() && terms.requires_grad() ? terms : Tensor();
    const bool fresh = !leaf.defined() || !leaf.grad().defined();
    auto dterms = fresh ? torch::empty_like(terms) : leaf.grad();
    AT_DISPATCH_FLOATING_TYPES(dy.scalar_type(), "tiled_product", [&] {
      const auto product = kernel<scalar_t>(x, terms, base, scores);
      if (dx.defined()) product.backward_input(dy.const_data_ptr<scalar_t>(), dx.mutable_data_ptr<scalar_t>());
      product.backward_weights(dy.const_data_ptr<scalar_t>(), dterms.mutable_data_ptr<scalar_t>(), !fresh,
                               dbase.defined() ? dbase.mutable_data_ptr<scalar_t>() : nullptr,
                               dscores.mutable_data_ptr<scalar_t>());
    });
    if (leaf.defined()) {
      leaf.mutable_grad() = dterms;
      dterms = Tensor();
    }
    return {dx, dterms, dbase, dscores};
  }
};

}  // namespace

bool can_tile_product(const Tensor& x_BTI, const Tensor& terms_NOI) {
  return x_BTI.is_cpu() && x_BTI.scalar_type() == terms_NOI.scalar_type() &&
         (x_BTI.scalar_type() == at::kFloat || x_BTI.scalar_type() == at::kDouble);
}

Tensor tiled_product(const Tensor& x_BTI, const Tensor& terms_NOI, const Tensor& base_OI, const Tensor& scores_BN) {
  TORCH_CHECK(x_BTI.dim() == 3 && terms_NOI.dim() == 3 && x_BTI.size(2) == terms_NOI.size(2), "x ", x_BTI.sizes(),
              " does not fit terms ", terms_NOI.sizes());
  TORCH_CHECK(scores_BN.sizes() == at::IntArrayRef({x_BTI.size(0), terms_NOI.size(0)}), "scores are ", scores_BN.sizes());
  TORCH_CHECK(!base_OI.defined() || base_OI.sizes() == terms_NOI.sizes().slice(1), "the base is ", base_OI.sizes());
  return TiledProduct::apply(x_BTI.contiguous(), terms_NOI.contiguous(),
                             base_OI.defined() ? std::optional<Tensor>(base_OI.contiguous()) : std::nullopt,
                             scores_BN.contiguous());
}

}  // namespace mergex::routing
