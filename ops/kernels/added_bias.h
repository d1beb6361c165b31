#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/placement/placement.h"

namespace tessera {

// Says whether dense_bias(x, w, bias) computes dense(x, w) + bias with the communication of dense(x, w) alone, beside
// that for parameters that are gathered when they are read, for DTensors x laid out as `placements`, w (k, n) and bias
// (n): the product has no terms to be summed, and the bias is cut as the columns are. Anything else gives false.
bool adds_within(const Placements& placements, const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias);

// Says whether `product += bias` gives what `product + bias` gives, in the same layout. The product must be nobody
// else's, and read by no formula of a derivative. With a vector it is a view, to which autograd would write by way of
// its base.
bool adds_in_place(const at::Tensor& product, const at::Tensor& bias);

}  // namespace tessera
