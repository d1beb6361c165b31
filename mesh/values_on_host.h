#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/mesh/world.h"

namespace tessera {

// Returns the values of a collective's result on the host, for a decision by them. On a GPU this waits for them, and
// throws the failure of the job: a collective that was aborted there leaves any values, and no error of its own.
inline at::Tensor values_on_host(const at::Tensor& result, const World& world) {
  if (result.is_cpu()) return result;
  at::Tensor values = result.cpu();
  world.check_alive();
  return values;
}

}  // namespace tessera
