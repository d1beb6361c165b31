#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

// Declares functions for the attributes that Megatron-Core sets on parameters. For a DTensor they follow from its
// placements, so they can be neither forgotten nor wrong; on a plain tensor the caller sets them, as in Megatron-Core.
namespace tessera {

struct TensorParallelAttributes {
  bool is_parallel = false;
  int64_t partition_dim = -1;    // tensor dimension; -1: none
  int64_t partition_stride = 1;  // blocks per rank, assigned to ranks in turn

  friend bool operator==(const TensorParallelAttributes&, const TensorParallelAttributes&) = default;
};

// Returns a DTensor's attributes by the first mesh dimension that shards it; for a plain tensor those that were set, or
// the defaults. Attributes stay with a plain tensor while it lives, also through set_data (and so Module::to); results
// of operators, such as detach() and clone(), have none.
TensorParallelAttributes tensor_parallel_attributes(const at::Tensor& tensor);

// Sets the attributes of a plain tensor, once.
// Throws std::invalid_argument where other attributes were set before, on a `dim` outside the tensor's dimensions where
// it is parallel, on a stride below 1, and on an undefined tensor. For a DTensor it checks that the placements agree;
// if not, it throws and the text gives both: redistribute the tensor.
void set_tensor_parallel_attributes(const at::Tensor& tensor, bool is_parallel, int64_t dim, int64_t stride = 1);
// Sets the defaults on a plain tensor without attributes; else does nothing.
void set_defaults_if_not_set_tensor_parallel_attributes(const at::Tensor& tensor);
// Sets on a plain `destination` the attributes that were set on `source`, or that its placements give, in the place of
// earlier ones; does nothing where `source` is plain and has none. If `destination` is a DTensor, checks and throws as
// above.
void copy_tensor_parallel_attributes(const at::Tensor& destination, const at::Tensor& source);

// Says whether this rank counts `parameter` in a sum over the ranks of the 1-D `mesh` in which each element is to count
// once, such as the norm of all gradients: true on the first of these ranks that has its piece. A plain parameter is
// taken to be the same on all of them, unless it was set to be parallel: then each rank counts its own. A DTensor may
// be on a mesh of more dimensions.
// Throws std::invalid_argument on a `mesh` of several dimensions or without this rank, and on a pending reduction.
bool is_not_tensor_parallel_duplicate(const at::Tensor& parameter, const DeviceMesh& mesh);

}  // namespace tessera
