#include <algorithm>

#include "merging/methods.h"
#include "merging/span_kernels.h"

namespace mergex::merging {
namespace {

constexpr Parameter kParameters[] = {{.name = "scale",
                                      .scope = Parameter::Scope::kInput,
                                      .kind = Parameter::Kind::kNumber,
                                      .fallback = 1.0,
                                      .summary = "factor of the tensor"}};

std::optional<int> copies(const TensorContext& context) {
  return context.inputs[0].parameters["scale"] == 1.0 ? std::optional(0) : std::nullopt;
}

template <class T>
class PassthroughMerge final : public TensorMerge<T> {
 public:
  explicit PassthroughMerge(const TensorContext& context)
      : scale_(static_cast<T>(context.inputs[0].parameters["scale"])) {}

  void merge(const Tile<T>& tile, const Workspace<T>&, T* out) const override {
    std::copy_n(tile.inputs[0], tile.count, out);
    if (scale_ != T{1}) span_kernels<T>().scale(tile.count, scale_, out);
  }

 private:
  T scale_;
};

template <class T>
std::unique_ptr<TensorMerge<T>> make(const TensorContext& context, ModelState*) {
  return std::make_unique<PassthroughMerge<T>>(context);
}

}  // namespace

constinit const Method kPassthrough{
    .name = "passthrough",
    .summary = "one model's tensor as it is, or scaled; with slices, layers in a new order",
    .paper = "Kim et al. 2023, arXiv:2312.15166 (depth up-scaling)",
    .max_inputs = 1,
    .parameters = kParameters,
    .copies = copies,
    .make_float = make<float>,
    .make_double = make<double>};

}  // namespace mergex::merging
