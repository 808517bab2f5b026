#include "tensor/autocast.h"

#include <torch/torch.h>

#include <ATen/autocast_mode.h>

namespace mergex::tensor {

Autocast::Autocast(c10::DeviceType device, c10::ScalarType dtype)
    : device_(device),
      dtype_before_(at::autocast::get_autocast_dtype(device)),
      enabled_before_(at::autocast::is_autocast_enabled(device)),
      cached_before_(at::autocast::is_autocast_cache_enabled()) {
  at::autocast::set_autocast_enabled(device, dtype != at::kFloat);
  if (dtype != at::kFloat) at::autocast::set_autocast_dtype(device, dtype);
  // The cache would keep casts made without gradient for passes that need one, and each weight is used once a pass.
  at::autocast::set_autocast_cache_enabled(false);
}

Autocast::~Autocast() {
  at::autocast::set_autocast_enabled(device_, enabled_before_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_cache_enabled(cached_before_);
}

c10::ScalarType Autocast::current(c10::DeviceType device) {
  return at::autocast::is_autocast_enabled(device) ? at::autocast::get_autocast_dtype(device) : at::kFloat;
}

}  // namespace mergex::tensor
