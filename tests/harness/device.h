#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>

#include "tessera/tests/harness/device_name.h"

namespace tessera::testing {

// Returns device_name() as LibTorch's type.
inline c10::Device device() { return c10::Device(device_name()); }
// Returns the options of a tensor of `dtype` on device().
inline at::TensorOptions on(at::ScalarType dtype) { return at::TensorOptions(dtype).device(device()); }
inline at::Tensor on_device(const at::Tensor& t) { return t.defined() ? t.to(device()) : t; }

}  // namespace tessera::testing
