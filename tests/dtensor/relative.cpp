#include "tessera/tests/dtensor/relative.h"

#include <ATen/ATen.h>

#include "tessera/tests/dtensor/values.h"

namespace tessera::testing {

bool close_to_scale(const at::Tensor& got, const at::Tensor& want, double tolerance) {
  if (got.scalar_type() != want.scalar_type()) return false;
  const double scale = want.numel() > 0 ? want.to(at::kDouble).nan_to_num(0, 0, 0).abs().max().item<double>() : 0;
  if (scale == 0) return same(got, want);
  return close(got / scale, want / scale, tolerance);
}

}  // namespace tessera::testing
