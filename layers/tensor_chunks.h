#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

// Plain tensors in equal parts.
namespace tessera {

// [*, m] -> num_partitions tensors [*, m / num_partitions]: views, or contiguous copies. No communication.
// Differentiable. Throws std::invalid_argument when m is not a multiple of num_partitions, or there is no last
// dimension.
std::vector<at::Tensor> split_along_last_dim(const at::Tensor& tensor, int64_t num_partitions,
                                             bool contiguous_split_chunks = false);

// Of `tensor` in the order of its elements this rank's part of mesh.size() equal ones: [*] -> [numel / mesh.size()]. A
// view, where the tensor is contiguous; with new_buffer, memory of its own. No communication; no gradient passes.
// Throws std::invalid_argument, alike on every rank, when the ranks do not divide the elements, on a mesh of several
// dimensions, and on a rank outside the mesh.
at::Tensor split_into_1d_equal_chunks(const at::Tensor& tensor, const DeviceMesh& mesh, bool new_buffer = false);

// The parts of all ranks one after the other: [c] -> [c * mesh.size()]. One all_gather of c elements. No gradient
// passes. Throws std::invalid_argument on a tensor that is not 1-D and on a mesh as above.
at::Tensor gather_split_1d_tensor(const at::Tensor& tensor, const DeviceMesh& mesh);

}  // namespace tessera
