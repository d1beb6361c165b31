#include "tessera/dtensor/bucketed_grad.h"

#include <utility>

#include "tessera/dtensor/dtensor.h"

namespace tessera {
namespace {

// Returns placements that a tensor laid out as either is brought into without communication, unless both are cut: on
// each mesh dimension Partial if one is, else Shard if one is.
Placements of_both(Placements a, const Placements& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].is_replicate() || (b[i].is_partial() && !a[i].is_partial())) a[i] = b[i];
  }
  return a;
}

}  // namespace

at::Tensor BucketedGrad::become_term(const at::Tensor& gradient) const {
  const at::Tensor tensor = parameter();
  if (!tensor.defined() || !tensor.grad().defined()) return gradient;
  at::Tensor& grad = tensor.mutable_grad();
  const Placements both = of_both(placements_of(grad), placements_of(gradient));
  if (placements_of(grad) != both) grad = redistribute(grad, both);
  return placements_of(gradient) == both ? gradient : redistribute(gradient, both);
}

at::Tensor BucketedGrad::take() const {
  const at::Tensor tensor = parameter();
  if (!tensor.defined() || !is_dtensor(tensor.grad())) return {};
  return std::exchange(tensor.mutable_grad(), at::Tensor());
}

at::Tensor BucketedGrad::take_unless(const Placements& layout) const {
  const at::Tensor tensor = parameter();
  if (!tensor.defined() || !is_dtensor(tensor.grad()) || placements_of(tensor.grad()) == layout) return {};
  return take();
}

void BucketedGrad::add(const at::Tensor& value) const {
  const at::Tensor tensor = parameter();
  if (!tensor.defined()) return;
  at::Tensor& grad = tensor.mutable_grad();
  if (grad.defined()) {
    grad.add_(value);
  } else {
    grad = value;
  }
}

}  // namespace tessera
