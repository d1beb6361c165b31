#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/core/reduce_op.h"
#include "tessera/mesh/device_mesh.h"

// Code written by hand for tensor parallelism moves plain tensors, each rank's own, into and out of its parallel
// regions by these. Each is one change of placement, with the placement that the result's gradient is taken to have:
//
//   function                          forward                            gradient of the result   backward
//   copy_to_region                    R -> R         nothing             P(op)                    all_reduce
//   reduce_from_region                P(op) -> R     all_reduce          R                        nothing
//   scatter_to_region                 R -> S(d)      own part            S(d)                     all_gather
//   gather_from_region                S(d) -> R      all_gather          R                        own part
//   gather_from_region, its gradient
//     pending                         S(d) -> R      all_gather          P(sum)                   reduce_scatter
//   reduce_scatter_to_region          P(sum) -> S(d) reduce_scatter      S(d)                     all_gather
//
// All collectives run over the one dimension of `mesh` (of more, take one: mesh["tp"], or several as one:
// mesh.merged({1, 2}), as experts do); on one rank none. A reduce_scatter or all_gather of a small tensor may be
// carried out as another collective of the same effect, as any redistribution may. Nothing is written in place, results
// are contiguous, and `x` may have any strides. Parts are torch.chunk's.
//
// Results may share the memory of `x`. That of copy_to_region does so where `x` is contiguous, and is a view of it:
// autograd refuses to write it in place where `x` requires grad. On one rank the others give a contiguous `x` itself.
// So clone a result before writing it in place.
//
// `tensor_dim` counts from the end where negative. Throw std::invalid_argument, on every rank alike, on a mesh of
// several dimensions or without this rank, a DTensor, a dimension that is not there, a size that the ranks do not
// divide unless that is allowed, and an `op` that the dtype has not.
//
// Source: Shoeybi et al., Megatron-LM (2019), and Korthikanti et al., Reducing Activation Recomputation (2022),
// sections 4.1 and 4.2.
namespace tessera {

// `op`: how the gradients of the ranks become one. Of integers and bool, which have none, it may be any.
at::Tensor copy_to_region(const at::Tensor& x, const DeviceMesh& mesh, ReduceOp op = ReduceOp::kSum);

// The gradient of each rank's `x` is the derivative of what came out, whatever `op` is: see
// FromLocalOptions::grad_placements.
at::Tensor reduce_from_region(const at::Tensor& x, const DeviceMesh& mesh, ReduceOp op = ReduceOp::kSum);

// With allow_uneven the last ranks have less, or nothing, where the size is not a multiple of the number of ranks.
at::Tensor scatter_to_region(const at::Tensor& x, const DeviceMesh& mesh, int64_t tensor_dim = -1,
                             bool allow_uneven = false);
at::Tensor reduce_scatter_to_region(const at::Tensor& x, const DeviceMesh& mesh, int64_t tensor_dim = 0,
                                    bool allow_uneven = false);

struct GatherOptions {
  int64_t tensor_dim = -1;
  // Whether the ranks use the result each for its own part of the work, so that gradients are terms of the gradient.
  // False where all compute the same after it: then the gradient is there already, and summing would multiply it.
  bool pending_gradient = false;
  // Of the whole along tensor_dim. Default: as many on every rank as here. Parts that are uneven need it.
  std::optional<int64_t> size;
};
at::Tensor gather_from_region(const at::Tensor& x, const DeviceMesh& mesh, const GatherOptions& options = {});

// Along dimension 0, which sequences have in Megatron's layouts.
at::Tensor scatter_to_sequence_region(const at::Tensor& x, const DeviceMesh& mesh, bool allow_uneven = false);
at::Tensor reduce_scatter_to_sequence_region(const at::Tensor& x, const DeviceMesh& mesh, bool allow_uneven = false);
// `tensor_parallel_output_grad`: pending_gradient, true where a layer cut over the ranks comes next.
at::Tensor gather_from_sequence_region(const at::Tensor& x, const DeviceMesh& mesh,
                                       bool tensor_parallel_output_grad = true,
                                       const std::optional<int64_t>& size = std::nullopt);

}  // namespace tessera
