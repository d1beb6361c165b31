#pragma once

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/spec.h"

namespace tessera::detail {

// Is called for each tensor that takes part in an operator on DTensors, to_local or redistribute. Adds a hook, once per
// tensor, so that
//   - a leaf DTensor's gradient arrives in the leaf's own layout, after one redistribution: autograd first sums the
//     gradients of all uses, with their pending reductions (a Partial leaf takes a replicated gradient);
//   - a plain tensor's gradient arrives whole and plain.
void watch_gradient(const at::Tensor& t);

// For a DTensor that an operator returned: adds a hook that reduces what is pending in its gradient, once autograd has
// summed all uses, into the tensor's own layout; other mesh dimensions stay as they are. So an activation that several
// contracts use needs only one reduction. Returns a shared counter of the contracts that use this tensor, one for each
// call; nullptr for a tensor that no operator returned.
std::shared_ptr<const int> add_reduction_hook(const at::Tensor& t);

// For a DTensor that an operator returned: adds a hook that redistributes its gradient, once autograd has summed all
// uses, into the tensor's own layout, with Partial as Replicate. Its communication is counted under `path`.
void add_layout_hook(const at::Tensor& t, const std::string& path);

}  // namespace tessera::detail
