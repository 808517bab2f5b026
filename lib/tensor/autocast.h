#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace mergex::tensor {

/// While this object lives, matrix products of float32 tensors on this kind of device are computed in `dtype`
/// (torch's autocast); float32: they stay as they are. Only the forward pass belongs inside.
class Autocast {
 public:
  Autocast(c10::DeviceType device, c10::ScalarType dtype);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

  /// What holds now: float32 where nothing is cast.
  static c10::ScalarType current(c10::DeviceType device);

 private:
  c10::DeviceType device_;
  c10::ScalarType dtype_before_;
  bool enabled_before_, cached_before_;
};

/// Inside an Autocast: what is computed while this object lives stays in its own dtype.
class NoAutocast {
 public:
  NoAutocast() : guard_(c10::autocast_dispatch_keyset) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace mergex::tensor
