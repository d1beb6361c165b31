#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/contract.h"
#include "tessera/placement/placement.h"

namespace tessera {

// Says how a style redistributes the activation of a product.
struct StyledProduct {
  Placements desired;
  ContractPtr contract;
  // Is the shared counter of the contracts that use the activation, which detail::add_reduction_hook returns; nullptr
  // if nobody counts them.
  std::shared_ptr<const int> uses;
};

// Returns dense(redistribute(x, desired), w) for DTensors x (..., k) and w (k, n), of which none is pending; with a
// bias, which adds_within() must allow, dense_bias of them. If nothing else has used x, backward redistributes x's
// gradient while it computes w's: a pending gradient is reduced, and it gets x's layout. With the contract's
// `gather_input_again`, autograd saves x as it is, and backward redistributes it to `desired` again while it computes
// x's gradient.
//
// Returns nullopt where neither would happen: no gradient is recorded; x is redistributed, but not again in backward;
// or x is a matrix that is not redistributed, for which LibTorch's own product is good.
std::optional<at::Tensor> styled_product(const at::Tensor& x, const at::Tensor& w,
                                         const std::optional<at::Tensor>& bias, const StyledProduct& how);

// Says whether dense_bias(x, w, bias) computes dense(x, w) + bias with the communication of dense(x, w) alone, beside
// that for parameters that are gathered when they are read, for DTensors x laid out as `placements`, w (k, n) and bias
// (n): the product has no terms to be summed, and the bias is cut as the columns are.
bool adds_within(const Placements& placements, const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias);

}  // namespace tessera
