#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/collectives/pending_collective.h"
#include "tessera/mesh/core/reduce_op.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

// These collectives run over one mesh dimension of n = mesh.size(mesh_dim) ranks, given by its index or its name. All
// of them:
//   - are out of place, take any strides and return contiguous tensors;
//   - do not communicate when n is 1: the result may then share the input's storage;
//   - tell the world's observers their name and the size of this rank's input in bytes (broadcast and scatter: 0 except
//     at the source);
//   - send any dtype but quantized ones, as bytes where the backend does not have it. Dtypes that a backend cannot
//     reduce (int8, int16, uint16, uint32, float8) are widened, reduced and narrowed. bool is reduced as 0 and 1, by
//     max, min and bitwise operations only. avg of integers, and bitwise operations on other dtypes, are refused;
//   - communicate nothing for tensors that are empty on every rank, except all_to_all and permute;
//   - have no gradient.
//
// On the CPU, reduce_scatter reduces in the order of coordinates.
//
// Throws std::invalid_argument on arguments (before communicating), std::runtime_error when the group fails (see World)
// or another thread of this rank is in a collective. Counts and a piece that do not fit them, which may be so on this
// rank alone, fail the job too; so does a second thread. Other wrong arguments, such as a number of rows, are refused
// on the ranks that pass them, which must be all. A rank outside the mesh must not call them.

// [*] -> [n, *]: row i is the tensor of coordinate i. Shapes must be equal on every rank.
at::Tensor all_gather(const at::Tensor& input, const DeviceMesh& mesh, const MeshDim& mesh_dim);
// Does the same for uneven 1-D pieces: counts[c] elements of coordinate c, one piece after the other.
at::Tensor all_gather(const at::Tensor& input, const std::vector<int64_t>& counts, const DeviceMesh& mesh,
                      const MeshDim& mesh_dim);
// [*] -> [*]: the tensors are reduced over the mesh dimension.
at::Tensor all_reduce(const at::Tensor& input, const DeviceMesh& mesh, const MeshDim& mesh_dim, ReduceOp op);
// [n, *] -> [*]: coordinate i gets row i of every rank, reduced.
at::Tensor reduce_scatter(const at::Tensor& input, const DeviceMesh& mesh, const MeshDim& mesh_dim, ReduceOp op);
// Does the same for uneven 1-D pieces: counts[c] elements for coordinate c, one piece after the other.
at::Tensor reduce_scatter(const at::Tensor& input, const std::vector<int64_t>& counts, const DeviceMesh& mesh,
                          const MeshDim& mesh_dim, ReduceOp op);
// Exchanges uneven 1-D pieces. `input` has sum(send) elements, ordered by receiving coordinate; the result has
// sum(receive) elements, ordered by sending coordinate.
at::Tensor all_to_all(const at::Tensor& input, const std::vector<int64_t>& send, const std::vector<int64_t>& receive,
                      const DeviceMesh& mesh, const MeshDim& mesh_dim);
// Does the same where every rank sends to at most one other rank; recorded as "permute".
at::Tensor permute(const at::Tensor& input, const std::vector<int64_t>& send, const std::vector<int64_t>& receive,
                   const DeviceMesh& mesh, const MeshDim& mesh_dim);
// Returns the tensor of coordinate `source`; `input` gives shape and dtype on every rank.
at::Tensor broadcast(const at::Tensor& input, const DeviceMesh& mesh, const MeshDim& mesh_dim, int64_t source);
// Coordinate i gets row i of the source's [n, *] as [*]. Other ranks' `input` is ignored; `like` gives shape and dtype.
at::Tensor scatter(const at::Tensor& input, const at::Tensor& like, const DeviceMesh& mesh, const MeshDim& mesh_dim,
                   int64_t source);
// Returns when every rank of the mesh dimension has called it.
void barrier(const DeviceMesh& mesh, const MeshDim& mesh_dim);

// These start the collectives above without waiting: wait() returns the result. The arguments must not change until
// then. With `owned`, start_all_reduce reduces `input` in place if its dtype allows it. With WaitTime::kAtOnce, which
// is faster on a GPU, the caller waits with the same current stream, and gains nothing from work before that.
PendingCollective start_all_gather(const at::Tensor& input, const std::vector<int64_t>& counts, const DeviceMesh& mesh,
                                   const MeshDim& mesh_dim, WaitTime wait_time = WaitTime::kLater);
PendingCollective start_all_reduce(const at::Tensor& input, const DeviceMesh& mesh, const MeshDim& mesh_dim,
                                   ReduceOp op, bool owned = false, WaitTime wait_time = WaitTime::kLater);
PendingCollective start_reduce_scatter(const at::Tensor& input, const std::vector<int64_t>& counts,
                                       const DeviceMesh& mesh, const MeshDim& mesh_dim, ReduceOp op,
                                       WaitTime wait_time = WaitTime::kLater);
PendingCollective start_all_to_all(const at::Tensor& input, const std::vector<int64_t>& send,
                                   const std::vector<int64_t>& receive, const DeviceMesh& mesh, const MeshDim& mesh_dim,
                                   WaitTime wait_time = WaitTime::kLater);
PendingCollective start_permute(const at::Tensor& input, const std::vector<int64_t>& send,
                                const std::vector<int64_t>& receive, const DeviceMesh& mesh, const MeshDim& mesh_dim,
                                WaitTime wait_time = WaitTime::kLater);

}  // namespace tessera
