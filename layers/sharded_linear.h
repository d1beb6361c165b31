#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

struct ShardedLinearOptions {
  // Every rank has the whole input, and its own columns of the weight give a term of the input's gradient: it is
  // all-reduced, while the weight's gradient is computed.
  bool reduce_input_gradient = false;
  // Every rank has its rows of the input, cut along dimension 0: they are gathered, in backward once more while the
  // input's gradient is computed, and that is reduce-scattered while the weight's gradient is. Contains
  // reduce_input_gradient.
  bool sequence_parallel = false;
  // The size of dimension 0 of the whole input under sequence_parallel. Default: as many rows on every rank as here;
  // uneven rows, which lie as torch.chunk has it, need it.
  int64_t sequence_size = -1;
  // Every rank has columns of the weight and the same features of the input, so that its product is a term of the
  // output: that is all-reduced, and the bias, which every rank has, added to the sum. Not with the two above.
  bool reduce_output = false;
  // No gradient of the weight: the input is not kept for it.
  bool frozen_weight = false;
  // [out, in], of float32 or the weight's dtype: where the weight's gradient is asked for, it is added to this by the
  // matmul itself, and the weight gets none.
  at::Tensor main_grad;
};

// x W^T + b of this rank's plain tensors: input [*, in], weight [out, in], bias [out] or undefined -> [*, out]. One
// function for the linear layers of all families: columns or rows of the weight are the caller's, who says by the
// options what the ranks' inputs are.
//
// Collectives over the one dimension of `mesh`, on more than one rank: reduce_input_gradient one all_reduce of the
// input's bytes in backward; sequence_parallel one all_gather of the input's bytes in forward, the same in backward
// where the weight wants a gradient, and one reduce_scatter of the gathered input's bytes in backward; reduce_output
// one all_reduce of the output's bytes in forward. A gradient that nobody wants is not computed nor sent.
// Gradients of gradients go by the same mathematics in differentiable steps. Under autocast all three are cast as for
// at::linear. Throws std::invalid_argument, on every rank alike, on reduce_output with another of the collectives,
// undefined tensors, DTensors, tensors on another device than the mesh's, and a mesh of several dimensions or without
// this rank. Pieces of other shapes or dtypes than these, which this rank alone may have, fail the job. Backward throws
// it where main_grad meets a gradient of the gradient. Source: Narayanan et al., Efficient Large-Scale Language Model
// Training on GPU Clusters (2021); Korthikanti et al. (2022).
at::Tensor sharded_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                          const DeviceMesh& mesh, const ShardedLinearOptions& options = {});

}  // namespace tessera
