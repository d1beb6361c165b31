#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

struct ShardedLinearOptions {
  // Every rank has the whole input and its own output features of the weight, so its product gives one term of the
  // input's gradient: the terms are all-reduced while the weight's gradient is computed.
  bool reduce_input_gradient = false;
  // Every rank has its part of the input along dimension 0. The parts are gathered in forward, and again in backward
  // while the input's gradient is computed; that gradient is reduce-scattered while the weight's is computed. It
  // includes reduce_input_gradient.
  bool sequence_parallel = false;
  // The size of dimension 0 of the whole input under sequence_parallel. Default: every rank has as many rows as this
  // one. Give it where rows are uneven, as torch.chunk splits them.
  int64_t sequence_size = -1;
  // Every rank has its own input features, of the weight and of the input, so its product is one term of the output:
  // the terms are all-reduced, and the bias, whole on every rank, is added to the sum. It excludes the two options
  // above.
  bool reduce_output = false;
  // The weight gets no gradient, and the input is not kept for one.
  bool frozen_weight = false;
  // [out, in], in float32 or the weight's dtype: backward adds the weight's gradient to it in the matmul itself, and
  // the weight gets no gradient.
  at::Tensor main_grad = {};
};

// Computes x W^T + b of this rank's plain tensors: input [*, in], weight [out, in], bias [out] or undefined -> [*,
// out]. All linear layers use this one function: the caller passes this rank's rows or columns of the weight, and says
// by the options what the inputs of the ranks are.
//
// Collectives over the 1-D `mesh`, on more than one rank:
//   reduce_input_gradient  backward: one all_reduce of the input's bytes
//   sequence_parallel      forward: one all_gather of the input's bytes
//                          backward: the same where the weight requires a gradient, and one reduce_scatter of the
//                          gathered input's bytes
//   reduce_output          forward: one all_reduce of the output's bytes
// A gradient that is not required is neither computed nor sent. Gradients of gradients use the same formulas in
// differentiable steps. Under autocast all three tensors are cast as for at::linear.
// Throws std::invalid_argument, on every rank, on reduce_output with one of the other two, undefined tensors, DTensors,
// tensors on another device than the mesh's, and a mesh of several dimensions or without this rank; in backward, where
// a gradient of the gradient is asked for with main_grad. Pieces of other shapes or dtypes than these, which only this
// rank may have, fail the job.
// Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021); Korthikanti et al.
// (2022).
at::Tensor sharded_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                          const DeviceMesh& mesh, const ShardedLinearOptions& options = {});

}  // namespace tessera
