#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

// What Megatron-Core notes on parameters. Of a DTensor its placements say it, so that nothing can be forgotten or
// disagree; on a plain tensor, which is whatever its caller takes it for, it is set as there.
namespace tessera {

struct TensorParallelAttributes {
  bool is_parallel = false;
  int64_t partition_dim = -1;    // of the tensor, -1: none
  int64_t partition_stride = 1;  // pieces a rank, dealt out in turn

  friend bool operator==(const TensorParallelAttributes&, const TensorParallelAttributes&) = default;
};

// Of a DTensor, by the first mesh dimension that cuts it; of a plain tensor what was set, else the defaults. What was
// set stays with that tensor while it lives, through set_data (so Module::to) too; results of operators, such as
// detach() and clone(), have none.
TensorParallelAttributes tensor_parallel_attributes(const at::Tensor& tensor);

// Sets what a plain tensor is, once: throws std::invalid_argument where other attributes were set, on a dim outside the
// tensor's dimensions where it is parallel, on a stride below 1, and on an undefined tensor. Of a DTensor it checks
// that the placements say so, and throws with both where they do not; redistribute makes it so.
void set_tensor_parallel_attributes(const at::Tensor& tensor, bool is_parallel, int64_t dim, int64_t stride = 1);
// Sets the defaults on a plain tensor without attributes; else does nothing.
void set_defaults_if_not_set_tensor_parallel_attributes(const at::Tensor& tensor);
// Sets on a plain `destination` what was set on `source` or what its placements say, in the place of what `destination`
// had; nothing where `source` is plain without attributes. Of a DTensor it checks, and throws, as above.
void copy_tensor_parallel_attributes(const at::Tensor& destination, const at::Tensor& source);

// Whether this rank counts `parameter` in a sum over the ranks of `mesh`, of one dimension, in which each value is to
// count once, as in the norm of all gradients: it is the first of these ranks that has its piece. A plain parameter is
// on all of them, unless it was set to be parallel: then each rank counts its own. A DTensor may lie on a mesh of more
// dimensions. Throws std::invalid_argument on a mesh of several dimensions or without this rank, and on a pending
// reduction.
bool is_not_tensor_parallel_duplicate(const at::Tensor& parameter, const DeviceMesh& mesh);

}  // namespace tessera
