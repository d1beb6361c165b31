#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

// Products of whole operators, so that no dimension is flattened on the way (flattening a sharded dimension that is not
// the leftmost would gather it). Differentiable any number of times; ordinary operators to the dispatcher, with rules
// of their own.

// x (..., k), w (k, n) -> (..., n)
at::Tensor dense(const at::Tensor& x, const at::Tensor& w);
// x (..., k), g (..., n) -> (k, n), summed over the leading dimensions
at::Tensor dense_wgrad(const at::Tensor& x, const at::Tensor& g);
// a (B..., m, k), b (B..., k, n) with equal B -> (B..., m, n)
at::Tensor batched_matmul(const at::Tensor& a, const at::Tensor& b);

// torch.matmul of DTensors in terms of these; what they do not cover goes LibTorch's own way.
at::Tensor matmul(const at::Tensor& a, const at::Tensor& b);

}  // namespace tessera
