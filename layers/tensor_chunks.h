#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

// Splits plain tensors into equal parts, and gathers them.
namespace tessera {

// Splits [*, m] into num_partitions tensors [*, m / num_partitions]: views, or contiguous copies. Differentiable.
// Does not communicate.
// Throws std::invalid_argument when m is not a multiple of num_partitions, and on a tensor without dimensions.
std::vector<at::Tensor> split_along_last_dim(const at::Tensor& tensor, int64_t num_partitions,
                                             bool contiguous_split_chunks = false);

// Returns this rank's part of `tensor`, of mesh.size() equal parts in the order of its elements: [*] -> [numel /
// mesh.size()]. It is a view where the tensor is contiguous; with new_buffer it has memory of its own. It is
// not differentiable.
// Does not communicate.
// Throws std::invalid_argument, on every rank, when the number of elements is not a multiple of mesh.size(), on a mesh
// of several dimensions, and on a rank outside the mesh.
at::Tensor split_into_1d_equal_chunks(const at::Tensor& tensor, const DeviceMesh& mesh, bool new_buffer = false);

// Returns the parts of all ranks one after the other: [c] -> [c * mesh.size()]. Runs one all_gather of c elements. Not
// differentiable. Throws std::invalid_argument on a tensor that is not 1-D and on a mesh as above.
at::Tensor gather_split_1d_tensor(const at::Tensor& tensor, const DeviceMesh& mesh);

}  // namespace tessera
