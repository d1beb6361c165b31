#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/contract.h"
#include "tessera/placement/placement.h"

namespace tessera {

// How a style brings an activation to a weight.
struct StyledProduct {
  Placements desired;
  ContractPtr contract;
  // How many contracts have taken the activation, where somebody counts.
  std::shared_ptr<const int> uses;
};

// dense(redistribute(x, desired), w) of DTensors, x (..., k) and w (k, n), none pending. In backward the input's
// gradient travels while the weight's is computed, where nobody else has taken x: out of the terms of a sum, and back
// to where x lies. With `gather_input_again` of the contract x is kept as it lies, and brought where the product takes
// it once more, while the input's gradient is computed.
//
// None where neither is to be had: no gradient is recorded; x moves, and is not to be brought again; x is a matrix that
// does not move, of which LibTorch's own product does well.
std::optional<at::Tensor> styled_product(const at::Tensor& x, const at::Tensor& w, const StyledProduct& how);

}  // namespace tessera
