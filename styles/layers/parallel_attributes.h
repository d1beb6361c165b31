#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

// What Megatron-Core notes on parameters. Here their placements say it, so that nothing can be forgotten or disagree.
namespace tessera {

struct TensorParallelAttributes {
  bool is_parallel = false;
  int64_t partition_dim = -1;    // of the tensor, -1: none
  int64_t partition_stride = 1;  // pieces a rank, dealt out in turn

  friend bool operator==(const TensorParallelAttributes&, const TensorParallelAttributes&) = default;
};

// Of a DTensor, by the first mesh dimension that cuts it; of every other tensor the defaults.
TensorParallelAttributes tensor_parallel_attributes(const at::Tensor& tensor);

// Checks that `tensor` is what it is said to be. Throws std::invalid_argument, with both, where its placements say otherwise;
// distribute_in_place makes it so.
void set_tensor_parallel_attributes(const at::Tensor& tensor, bool is_parallel, int64_t dim, int64_t stride = 1);
// The same of what another tensor is. Throws as above.
void copy_tensor_parallel_attributes(const at::Tensor& destination, const at::Tensor& source);

// Whether this rank counts `parameter` in a sum over the ranks of `mesh`, of one dimension, in which each value is to count once, as in the
// norm of all gradients: it is the first of these ranks that has its piece. A plain parameter is on all of them. A DTensor may lie on a
// mesh of more dimensions. Throws std::invalid_argument on a mesh of several dimensions or without this rank, and on a pending reduction.
bool is_not_tensor_parallel_duplicate(const at::Tensor& parameter, const DeviceMesh& mesh);

}  // namespace tessera
