#pragma once

#include <concepts>
#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/core/reduce_op.h"
#include "tessera/mesh/device_mesh.h"

// Declares the region mappings: hand-written tensor-parallel code uses them to pass plain tensors, each rank its own,
// into and out of its parallel regions. Each one is a change of placement; the third column is the placement that the
// result's gradient is taken to have:
//
//   function                          forward                            gradient of the result   backward
//   copy_to_region                    R -> R         nothing             P(op)                    all_reduce
//   reduce_from_region                P(op) -> R     all_reduce          R                        nothing; see below
//   scatter_to_region                 R -> S(d)      own part            S(d)                     all_gather
//   gather_from_region                S(d) -> R      all_gather          R                        own part
//   gather_from_region with
//     pending_gradient                S(d) -> R      all_gather          P(sum)                   reduce_scatter
//   reduce_scatter_to_region          P(sum) -> S(d) reduce_scatter      S(d)                     all_gather
//
// All collectives run over the one dimension of `mesh`; with one rank there are none. (Of a mesh of more dimensions,
// pass one, mesh["tp"], or merge several, mesh.merged({1, 2}), as expert parallelism does.) The planner may replace a
// reduce_scatter or all_gather of a small tensor by another collective of the same effect, as in any redistribution.
// Nothing is written in place, results are contiguous, and `x` may have any strides. Tensors are split as torch.chunk
// does.
//
// Results may share the memory of `x`. The result of copy_to_region is a view of `x` where `x` is contiguous; autograd
// refuses to write it in place where `x` requires grad. With one rank the other functions return a contiguous `x`
// itself. So clone a result before writing it in place.
//
// A negative `tensor_dim` counts from the end. All throw std::invalid_argument, on every rank alike, on a mesh of
// several dimensions or without this rank, a DTensor, a dimension that does not exist, a size that the number of ranks
// does not divide (unless allow_uneven), and an `op` that the dtype does not have.
namespace tessera {

// The gradients of the ranks are reduced by `op`. For integers and bool, which have no gradient, any op is accepted.
at::Tensor copy_to_region(const at::Tensor& x, const DeviceMesh& mesh, ReduceOp op = ReduceOp::kSum);

// The gradient of each rank's `x` is the derivative of the result with respect to it, for every `op`: see
// FromLocalOptions::grad_placements. For max, min and product backward runs two all_reduces of the bytes of `x`.
at::Tensor reduce_from_region(const at::Tensor& x, const DeviceMesh& mesh, ReduceOp op = ReduceOp::kSum);

// With allow_uneven the last ranks get less, or nothing, where the size is not a multiple of the number of ranks.
at::Tensor scatter_to_region(const at::Tensor& x, const DeviceMesh& mesh, int64_t tensor_dim = -1,
                             bool allow_uneven = false);
at::Tensor reduce_scatter_to_region(const at::Tensor& x, const DeviceMesh& mesh, int64_t tensor_dim = 0,
                                    bool allow_uneven = false);

// A bool in the place of tensor_dim would be a dimension.
template <std::same_as<bool> Uneven>
at::Tensor scatter_to_region(const at::Tensor& x, const DeviceMesh& mesh, Uneven) = delete;
template <std::same_as<bool> Uneven>
at::Tensor reduce_scatter_to_region(const at::Tensor& x, const DeviceMesh& mesh, Uneven) = delete;

struct GatherOptions {
  int64_t tensor_dim = -1;
  // Says whether each rank uses the result for its own part of the work only, so that the ranks' gradients are terms of
  // a sum. False where all ranks compute the same from it: each then has the whole gradient, and a sum would multiply
  // it.
  bool pending_gradient = false;
  // Gives the size of the whole along tensor_dim. Default: this rank's size times the number of ranks. Uneven parts
  // need it.
  std::optional<int64_t> size = {};
};
at::Tensor gather_from_region(const at::Tensor& x, const DeviceMesh& mesh, const GatherOptions& options = {});

// Do the same along dimension 0, the sequence dimension in Megatron's layouts.
at::Tensor scatter_to_sequence_region(const at::Tensor& x, const DeviceMesh& mesh, bool allow_uneven = false);
at::Tensor reduce_scatter_to_sequence_region(const at::Tensor& x, const DeviceMesh& mesh, bool allow_uneven = false);
// `tensor_parallel_output_grad` is pending_gradient: true where a layer that is sharded over the ranks follows.
at::Tensor gather_from_sequence_region(const at::Tensor& x, const DeviceMesh& mesh,
                                       bool tensor_parallel_output_grad = true,
                                       const std::optional<int64_t>& size = std::nullopt);
// A number in the place of a bool would be true.
template <std::integral Number>
requires(!std::same_as<Number, bool>) at::Tensor
    scatter_to_sequence_region(const at::Tensor& x, const DeviceMesh& mesh, Number)
= delete;
template <std::integral Number>
requires(!std::same_as<Number, bool>) at::Tensor
    reduce_scatter_to_sequence_region(const at::Tensor& x, const DeviceMesh& mesh, Number)
= delete;
template <std::integral Number>
requires(!std::same_as<Number, bool>) at::Tensor
    gather_from_sequence_region(const at::Tensor& x, const DeviceMesh& mesh, Number)
= delete;

}  // namespace tessera
