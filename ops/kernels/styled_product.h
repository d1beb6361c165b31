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
// bias, which adds_within() of added_bias.h must allow, dense_bias of them. If nothing else has used x, backward
// redistributes x's gradient while it computes w's: a pending gradient is reduced, and it gets x's layout. With the
// contract's `gather_input_again`, autograd saves x as it is, and backward redistributes it to `desired` again while it
// computes x's gradient.
//
// Returns nullopt where neither would happen: no gradient is recorded; x is redistributed, but not again in backward;
// or x is a matrix that is not redistributed, for which LibTorch's own product is good.
std::optional<at::Tensor> styled_product(const at::Tensor& x, const at::Tensor& w,
                                         const std::optional<at::Tensor>& bias, const StyledProduct& how);

}  // namespace tessera
