#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/contract.h"
#include "tessera/mesh/mesh.h"
#include "tessera/placement/placement.h"

namespace tessera::detail {

// Returns the contract's path and style, for errors.
std::string named(const Contract& contract);

// Returns `placements` of a tensor of `shape` on `mesh`, with `there` on the contract's mesh dimension. Placements of
// other mesh dimensions that cannot be beside it are replaced by fitted_around. Throws std::invalid_argument if the
// tensor has no such dimension; the text names the operator `op`, and the tensor as `what`.
Placements as_contract_says(const Placements& placements, const Contract& contract, const Placement& there,
                            const Mesh& mesh, at::IntArrayRef shape, std::string_view op, const char* what);

// Holds an activation as a DTensor, and the layout that the contract asks for.
struct Activation {
  at::Tensor tensor;
  Placements desired;
  std::shared_ptr<const int> uses;  // shared counter of the contracts that use it; see add_reduction_hook
};

// Returns the activation `x` of the operator `op`, whose parameter has the contract. A plain x is this rank's piece,
// laid out as the contract's input. Does not communicate. Throws std::invalid_argument where x is on another mesh, has
// no dimension that the contract cuts, or is plain and does not tell what it is a piece of.
Activation activation_of(const at::Tensor& x, const Contract& contract, const at::Tensor& parameter,
                         std::string_view op);

}  // namespace tessera::detail
