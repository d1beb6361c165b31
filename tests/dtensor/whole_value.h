#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/dtensor.h"

namespace tessera::testing {

// Returns the value of `t`, of a DTensor the whole one, without its history. Communicates for DTensors.
inline at::Tensor whole_value(const at::Tensor& t) { return is_dtensor(t) ? full_tensor(t.detach()) : t.detach(); }

}  // namespace tessera::testing
