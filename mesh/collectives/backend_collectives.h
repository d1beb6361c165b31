#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/collectives/collective_call.h"
#include "tessera/mesh/core/reduce_op.h"

namespace tessera {

// These functions start collectives on a group's backend and do not wait, except that tensors of a GPU which go over
// Gloo are copied to the host first. Each chooses the backend's primitive that is fastest. The caller has checked the
// arguments. Tensors are contiguous; counts are numbers of elements, one per rank.

// All-to-all: sends part i of the flat `input`, cut by `send`, to coordinate i. The result is a new flat tensor that
// holds receive[i] elements from coordinate i.
BackendWork exchange(const CollectiveCall& call, const at::Tensor& input, const std::vector<int64_t>& send,
                     const std::vector<int64_t>& receive);
// All-gathers flat tensors: the result holds counts[c] elements of coordinate c.
BackendWork gather(const CollectiveCall& call, const at::Tensor& input, const std::vector<int64_t>& counts);
// All-gathers tensors of one shape: [*] -> [n, *].
BackendWork gather_rows(const CollectiveCall& call, const at::Tensor& input);
// All-reduces `terms`, whose dtype must be one that reduced_as() returns; in place when `owned`.
BackendWork reduce_all(const CollectiveCall& call, const at::Tensor& terms, ReduceOp op, bool owned);
// Reduce-scatters the flat `terms`, cut by `counts`: the result is this rank's part.
BackendWork reduce_parts(const CollectiveCall& call, const at::Tensor& terms, const std::vector<int64_t>& counts,
                         ReduceOp op);
BackendWork broadcast_from(const CollectiveCall& call, const at::Tensor& fresh, int64_t source);
// Scatters the rows of the source's `input`; `like` gives shape and dtype of the result.
BackendWork scatter_from(const CollectiveCall& call, const at::Tensor& input, const at::Tensor& like, int64_t source);
BackendWork barrier_all(const CollectiveCall& call);

}  // namespace tessera
