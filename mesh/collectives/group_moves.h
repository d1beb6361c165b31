#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/collectives/collective_call.h"
#include "tessera/mesh/core/reduce_op.h"

namespace tessera {

// What travels over a group, and by which of its primitives: the one that is fastest on its backend. Each starts and does not
// wait; arguments have been checked. Tensors are contiguous; counts are of elements, one a rank.

// Flat `input`, cut by `send`, to everyone; what comes, cut by `receive`, in a new flat tensor.
Underway exchange(const CollectiveCall& call, const at::Tensor& input, const std::vector<int64_t>& send,
                  const std::vector<int64_t>& receive);
// Everyone's flat tensor, counts[c] of coordinate c.
Underway gather(const CollectiveCall& call, const at::Tensor& input, const std::vector<int64_t>& counts);
// [*] -> [n, *], the same shape on every rank.
Underway gather_rows(const CollectiveCall& call, const at::Tensor& input);
// `wire`, of a dtype of reduced_as(), reduced; in place when `owned`.
Underway reduce_all(const CollectiveCall& call, const at::Tensor& wire, ReduceOp op, bool owned);
// Flat `wire`, cut by `counts`, reduced: this rank's part.
Underway reduce_parts(const CollectiveCall& call, const at::Tensor& wire, const std::vector<int64_t>& counts, ReduceOp op);
Underway broadcast_from(const CollectiveCall& call, const at::Tensor& fresh, int64_t source);
// Rows of the source's `input` to everyone, as `like`.
Underway scatter_from(const CollectiveCall& call, const at::Tensor& input, const at::Tensor& like, int64_t source);
Underway meet(const CollectiveCall& call);

}  // namespace tessera
