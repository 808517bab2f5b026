#include "device.h"

#include <dlfcn.h>
#include <torch/torch.h>

#include <charconv>

#include "core/error.h"

namespace mergex::engine {
namespace {

/// "" when CUDA can be used, else what is missing.
std::string load_cuda() {
  // Not linked, so that one program serves machines without NVIDIA's libraries.
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    return fmt::format("LibTorch's CUDA part does not load ({}); ./bootstrap.sh deps --gpu fetches it", dlerror());
  }
  if (!torch::cuda::is_available()) return "no usable GPU or driver was found";
  return {};
}

}  // namespace

at::Device choose_device(const std::string& name) {
  if (name == "cpu") return at::kCPU;
  if (name == "auto") return load_cuda().empty() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  std::int64_t index = 0;
  if (name.starts_with("cuda:")) {
    const auto* end = name.data() + name.size();
    const auto [stop, error] = std::from_chars(name.data() + 5, end, index);
    if (error != std::errc() || stop != end || index < 0) fail("--device: got \"{}\", expected cuda:0, cuda:1, ...", name);
  } else if (name != "cuda") {
    fail("--device: got \"{}\", expected auto, cpu, cuda or cuda:N", name);
  }
  if (const auto missing = load_cuda(); !missing.empty()) fail("--device {}: {}; or use --device cpu", name, missing);
  if (index >= static_cast<std::int64_t>(torch::cuda::device_count())) {
    fail("--device: got \"{}\", but there are {} GPUs, counted from 0", name, torch::cuda::device_count());
  }
  return {at::kCUDA, static_cast<at::DeviceIndex>(index)};
}

}  // namespace mergex::engine
