#include "support/tensors.h"

#include <torch/torch.h>

#include "support/catch.h"
#include "tensor/convert.h"
#include "tensor/random_streams.h"

namespace mergex::test {

Tensors read_tensors(const std::filesystem::path& path) {
  const auto file = io::SafetensorsFile::open(path);
  Tensors result;
  for (const auto& view : file.tensors()) result.emplace(view.name, tensor::to_tensor(view));
  return result;
}

Comparison compare(const Tensor& got, const Tensor& expected, Tolerance tolerance) {
  if (!got.defined()) return {1e300, 1e300, "is undefined"};
  if (got.sizes() != expected.sizes()) {
    return {1e300, 1e300,
            fmt::format("is {}, expected {}", tensor::shape_text(got.sizes()), tensor::shape_text(expected.sizes()))};
  }
  if (got.numel() == 0) return {};
  const auto a = got.detach().to(at::kDouble).flatten(), b = expected.detach().to(at::kDouble).flatten();
  const auto difference = (a - b).abs().nan_to_num(1e300, 1e300, 1e300);
  const auto allowed = tolerance.absolute + tolerance.relative * b.abs();
  const auto units = torch::where(difference == 0, torch::zeros_like(difference), difference / allowed);
  const auto at = units.argmax().item<std::int64_t>();
  Comparison result{units[at].item<double>(), difference.max().item<double>()};
  if (result.worst > 1.0) {
    result.what = fmt::format("at flat index {}: got {:.17g}, expected {:.17g}", at, a[at].item<double>(),
                              b[at].item<double>());
  }
  return result;
}

void require_close(const std::string& name, const Tensor& got, const Tensor& expected, Tolerance tolerance) {
  const auto result = compare(got, expected, tolerance);
  INFO(name << " " << result.what);
  REQUIRE(result.worst <= 1.0);
}

void require_gradient(const std::string& name, const Tensor& got, const Tensor& expected, double share, double floor) {
  const auto zero = torch::zeros_like(expected);
  const auto largest = expected.numel() == 0 ? 0.0 : expected.abs().max().item<double>();
  require_close(name, got.defined() ? got : zero, expected, {0.0, std::max(share * largest, floor)});
}

Tensor seeded_normal(at::IntArrayRef sizes, std::uint64_t seed, at::ScalarType dtype) {
  auto generator = tensor::cpu_generator(seed, "test");
  return torch::empty(sizes, at::kDouble).normal_(0.0, 1.0, generator).to(dtype);
}

Tensor finite_differences(const std::function<double(const Tensor&)>& f, const Tensor& x, double step) {
  const torch::NoGradGuard no_grad;
  auto gradient = torch::zeros_like(x, at::kDouble);
  auto point = x.detach().clone().contiguous();
  auto flat = point.view(-1), out = gradient.view(-1);
  for (std::int64_t i = 0; i < flat.numel(); ++i) {
    const auto value = flat[i].item<double>();
    flat[i] = value + step;
    const auto above = f(point);
    flat[i] = value - step;
    const auto below = f(point);
    flat[i] = value;
    out[i] = (above - below) / (2 * step);
  }
  return gradient;
}

}  // namespace mergex::test
