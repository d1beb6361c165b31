#include "tessera/dtensor/bucketed_grad.h"

#include <utility>

#include "tessera/dtensor/dtensor.h"

namespace tessera {

void BucketedGrad::become_term(const Placements& gradient) const {
  const at::Tensor tensor = parameter();
  if (!tensor.defined()) return;
  at::Tensor& grad = tensor.mutable_grad();
  if (grad.defined() && placements_of(grad) != gradient) grad = redistribute(grad, gradient);
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
