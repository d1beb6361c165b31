#include "tessera/dtensor/core/memory_order.h"

#include <algorithm>
#include <vector>

#include <ATen/ops/empty_strided.h>

namespace tessera {

// Allocates nothing, since operators ask this at each call.
bool is_row_major(const Spec& spec) {
  int64_t step = 1;
  for (std::size_t i = spec.sizes.size(); i-- > 0;) {
    if (spec.strides[i] != step) return false;
    step *= std::max<int64_t>(spec.sizes[i], 1);
  }
  return true;
}

bool is_in_order_of(const Spec& spec, const at::Tensor& local) {
  const auto outside = [&](int64_t a, int64_t b) {
    const auto global = [&](int64_t dim) { return spec.strides[static_cast<std::size_t>(dim)]; };
    return global(a) > global(b) && global(b) != 0 && local.stride(a) < local.stride(b);
  };
  for (int64_t a = 0; a < local.dim(); ++a) {
    for (int64_t b = 0; b < local.dim(); ++b) {
      if (local.size(a) > 1 && local.size(b) > 1 && outside(a, b)) return false;
    }
  }
  return true;
}

at::Tensor as_dense(const at::Tensor& local, const Spec& spec) {
  if (is_row_major(spec) || std::ranges::find(spec.strides, 0) != spec.strides.end()) return local.contiguous();
  const std::vector<int64_t> strides = dense_strides(spec);
  if (local.strides() == at::IntArrayRef(strides)) return local;
  return at::empty_strided(local.sizes(), strides, local.options()).copy_(local);
}

at::Tensor in_memory_order(const at::Tensor& local, const Spec& spec) {
  return local.dim() < 2 || !local.is_contiguous() ? local : as_dense(local, spec);
}

}  // namespace tessera
