#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::testing {

// Says whether dtype and sizes are equal and values differ by at most `tolerance` of the largest magnitude of `want`,
// however small that is; for zeros they must be zeros.
bool close_to_scale(const at::Tensor& got, const at::Tensor& want, double tolerance);

}  // namespace tessera::testing
