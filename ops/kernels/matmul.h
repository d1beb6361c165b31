#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

// These products stay one operator, so that no dimension is flattened (flattening a sharded dimension that is not the
// leftmost would gather it). They can be differentiated any number of times, and the dispatcher runs them by rules of
// their own. The comments below give the shapes of their arguments and results.

// x (..., k), w (k, n) -> (..., n)
at::Tensor dense(const at::Tensor& x, const at::Tensor& w);
// x (..., k), w (k, n), bias (n) -> (..., n): dense(x, w) + bias by one operator
at::Tensor dense_bias(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias);
// x (..., k), g (..., n) -> (k, n), summed over the leading dimensions
at::Tensor dense_wgrad(const at::Tensor& x, const at::Tensor& g);
// g (..., n) -> (n), summed over the leading dimensions: the gradient of dense_bias's bias
at::Tensor sum_rows(const at::Tensor& g);
// a (B..., m, k), b (B..., k, n) with equal B -> (B..., m, n)
at::Tensor batched_matmul(const at::Tensor& a, const at::Tensor& b);

// Computes torch.matmul of DTensors by these. Products that they do not cover use LibTorch's own matmul.
at::Tensor matmul(const at::Tensor& a, const at::Tensor& b);

}  // namespace tessera
