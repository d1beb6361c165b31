#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/spec.h"

namespace tessera::detail {

// Called for tensors that take part in an operator on DTensors, to_local or redistribute. Sees to it, once a tensor,
// that
//   - a leaf DTensor's gradient arrives in the leaf's own layout: all its uses are summed first, pending reductions and
//     all, then there is one redistribution (Partial leaves take a replicated gradient);
//   - a plain tensor's gradient arrives whole and plain.
void watch_gradient(const at::Tensor& t);

// For a DTensor that is an operator's result: what is pending in its gradient, once all its uses are summed, is reduced
// into the tensor's own layout, and the rest stays as it is. So an activation that several contracts take pays for one
// reduction. Gives how often it was called for the tensor, which later calls change; null for one that is no operator's
// result.
std::shared_ptr<const int> watch_terms(const at::Tensor& t);

}  // namespace tessera::detail
