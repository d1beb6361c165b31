#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/collectives/collective_call.h"
#include "tessera/mesh/core/reduce_op.h"

namespace tessera {

// Collectives by the primitives of a group's backend: each takes the one that is fastest there, starts it and does not
// wait. Arguments have been checked. Tensors are contiguous; counts are of elements, one a rank.

// Flat `input`, cut by `send`, to everyone; what comes, cut by `receive`, in a new flat tensor.
BackendWork exchange(const CollectiveCall& call, const at::Tensor& input, const std::vector<int64_t>& send,
                     const std::vector<int64_t>& receive);
// Everyone's flat tensor, counts[c] of coordinate c.
BackendWork gather(const CollectiveCall& call, const at::Tensor& input, const std::vector<int64_t>& counts);
// [*] -> [n, *], the same shape on every rank.
BackendWork gather_rows(const CollectiveCall& call, const at::Tensor& input);
// `wire`, of a dtype of reduced_as(), reduced; in place when `owned`.
BackendWork reduce_all(const CollectiveCall& call, const at::Tensor& wire, ReduceOp op, bool owned);
// Flat `wire`, cut by `counts`, reduced: this rank's part.
BackendWork reduce_parts(const CollectiveCall& call, const at::Tensor& wire, const std::vector<int64_t>& counts,
                         ReduceOp op);
BackendWork broadcast_from(const CollectiveCall& call, const at::Tensor& fresh, int64_t source);
// Rows of the source's `input` to everyone, as `like`.
BackendWork scatter_from(const CollectiveCall& call, const at::Tensor& input, const at::Tensor& like, int64_t source);
BackendWork barrier_all(const CollectiveCall& call);

}  // namespace tessera
