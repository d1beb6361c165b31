#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::testing {

// Alike in dtype and sizes, values apart by at most `tolerance` of the largest magnitude of `want`, however small that
// is; of zeros, zeros.
bool close_to_scale(const at::Tensor& got, const at::Tensor& want, double tolerance);

}  // namespace tessera::testing
