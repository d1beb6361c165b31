#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/collectives/pending_collective.h"
#include "tessera/mesh/core/reduce_op.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Collectives over one dimension of a mesh, n = mesh.size(mesh_dim). All are out of place, take any strides, return
// contiguous tensors, and are identities without communication when n is 1: the result may then share the input's
// storage. Each is recorded with the world's observers under its own name, with the bytes of what this rank puts in
// (broadcast and scatter: 0 elsewhere than at the source). dtypes that a backend cannot move travel as bytes; those
// that it cannot reduce are widened (int8, int16, uint16, uint32, float8), reduced and narrowed; bool reduces by max,
// min and bits as 0 and 1, and is refused for the others. avg of integers and bits of others are refused. Tensors that
// are empty on every rank communicate nothing. No gradient passes.
//
// On the CPU reductions of reduce_scatter are added in the order of coordinates.
//
// Throws std::invalid_argument on arguments (before communicating), std::runtime_error when the group fails (see World)
// or another thread of this rank is in a collective. A rank outside the mesh must not call them.

// [*] -> [n, *]: row i is the tensor of coordinate i. Equal shapes on every rank.
at::Tensor all_gather(const at::Tensor& input, const DeviceMesh& mesh, int64_t mesh_dim);
// The same of uneven pieces: 1-D, counts[c] elements of coordinate c, one after the other.
at::Tensor all_gather(const at::Tensor& input, const std::vector<int64_t>& counts, const DeviceMesh& mesh,
                      int64_t mesh_dim);
// [*] -> [*]: reduced over the mesh dimension.
at::Tensor all_reduce(const at::Tensor& input, const DeviceMesh& mesh, int64_t mesh_dim, ReduceOp op);
// [n, *] -> [*]: row i of every rank, reduced, arrives at coordinate i.
at::Tensor reduce_scatter(const at::Tensor& input, const DeviceMesh& mesh, int64_t mesh_dim, ReduceOp op);
// The same of uneven pieces: 1-D, counts[c] elements for coordinate c, one after the other.
at::Tensor reduce_scatter(const at::Tensor& input, const std::vector<int64_t>& counts, const DeviceMesh& mesh,
                          int64_t mesh_dim, ReduceOp op);
// 1-D, uneven: input is sum(send) elements laid out by receiving coordinate; the result sum(receive), by sending
// coordinate.
at::Tensor all_to_all(const at::Tensor& input, const std::vector<int64_t>& send, const std::vector<int64_t>& receive,
                      const DeviceMesh& mesh, int64_t mesh_dim);
// all_to_all in which every rank sends to one other at most; recorded as "permute".
at::Tensor permute(const at::Tensor& input, const std::vector<int64_t>& send, const std::vector<int64_t>& receive,
                   const DeviceMesh& mesh, int64_t mesh_dim);
// The tensor of coordinate `source`; `input` gives shape and dtype on every rank.
at::Tensor broadcast(const at::Tensor& input, const DeviceMesh& mesh, int64_t mesh_dim, int64_t source);
// Row i of the source's [n, *] arrives at coordinate i as [*]. Elsewhere `input` is ignored; `like` gives shape and
// dtype.
at::Tensor scatter(const at::Tensor& input, const at::Tensor& like, const DeviceMesh& mesh, int64_t mesh_dim,
                   int64_t source);
// Returns when every rank of the mesh dimension has come.
void barrier(const DeviceMesh& mesh, int64_t mesh_dim);

// The same, begun alone: wait() returns what these return. What is given must stay as it is until then; an input of
// start_all_reduce that is `owned` is reduced in place where its dtype can be.
PendingCollective start_all_gather(const at::Tensor& input, const std::vector<int64_t>& counts, const DeviceMesh& mesh,
                                   int64_t mesh_dim);
PendingCollective start_all_reduce(const at::Tensor& input, const DeviceMesh& mesh, int64_t mesh_dim, ReduceOp op,
                                   bool owned = false);
PendingCollective start_reduce_scatter(const at::Tensor& input, const std::vector<int64_t>& counts,
                                       const DeviceMesh& mesh, int64_t mesh_dim, ReduceOp op);
PendingCollective start_all_to_all(const at::Tensor& input, const std::vector<int64_t>& send,
                                   const std::vector<int64_t>& receive, const DeviceMesh& mesh, int64_t mesh_dim);
PendingCollective start_permute(const at::Tensor& input, const std::vector<int64_t>& send,
                                const std::vector<int64_t>& receive, const DeviceMesh& mesh, int64_t mesh_dim);

}  // namespace tessera
