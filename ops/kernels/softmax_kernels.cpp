// This file has the local kernels of softmax, its logarithm and logsumexp on pieces of the dimensions along which they
// work: ranks join the greatest element and the sum of each line.

#include <limits>
#include <string>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sub.h>

#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/ops/kernels/arguments.h"
#include "tessera/ops/kernels/joined_pieces.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// Returns the greatest element of each line of all pieces. Runs one all_reduce of these.
at::Tensor greatest_of_all(const at::Tensor& piece, const Spec& spec, const std::vector<int64_t>& dims) {
  std::vector<int64_t> sizes = piece.sizes().vec();
  for (const int64_t d : dims) sizes[static_cast<std::size_t>(d)] = 1;
  const bool empty = reduced_count(spec.local_sizes, dims) == 0;
  const at::Tensor mine = empty ? at::full(sizes, -std::numeric_limits<double>::infinity(), piece.options())
                                : at::amax(piece, dims, /*keepdim=*/true);
  return joined(mine, spec, dims, ReduceOp::kMax);
}

// Runs _softmax(self, dim, half_to_float), _log_softmax and _safe_softmax(self, dim, dtype). Elements are taken
// relative to the greatest, as LibTorch does, so that no exponential overflows.
void softmax(const LocalCall& call, Stack& stack) {
  const Spec& spec = *call.inputs[0];
  const std::string& name = call.op.schema().name();
  const std::vector<int64_t> dims = reduced_dims(stack[1], spec.ndim());
  const at::ScalarType type = call.outputs[0]->dtype;
  const at::Tensor given = stack[0].toTensor();
  const at::Tensor piece = widened(name == "aten::_safe_softmax" ? given.to(type) : given);
  const at::Tensor greatest = greatest_of_all(piece, spec, dims);
  const bool of_logarithm = name == "aten::_log_softmax";
  at::Tensor out = at::empty_like(piece);
  const at::Tensor mine = sum_of_parts(piece, dims, [&](const Part& part) {
    at::Tensor here = part.of(out);
    at::sub_out(here, part.of(piece), part.of(greatest));
    return (of_logarithm ? here.exp() : here.exp_()).sum(dims, /*keepdim=*/true);
  });
  const at::Tensor sum = joined(mine, spec, dims, ReduceOp::kSum);
  if (of_logarithm) {
    out.sub_(sum.log());
  } else {
    out.div_(sum);
  }
  if (name == "aten::_safe_softmax") {  // a line of -inf alone gives zeros
    out.masked_fill_(greatest.eq(-std::numeric_limits<double>::infinity()), 0);
  }
  stack.assign({out.to(type)});
}

// Runs _softmax_backward_data(grad_output, output, dim, input_dtype) and _log_softmax_backward_data. With y the output
// and g its gradient, that of the input is  y (g - sum(y g)),  and for the logarithm  g - exp(y) sum(g).
void softmax_backward(const LocalCall& call, Stack& stack) {
  const Spec& spec = *call.inputs[1];
  const std::vector<int64_t> dims = reduced_dims(stack[2], spec.ndim());
  const at::Tensor grad = widened(stack[0].toTensor()), output = widened(stack[1].toTensor());
  const bool of_logarithm = call.op.schema().name() == "aten::_log_softmax_backward_data";
  at::Tensor out;
  if (of_logarithm) {
    out = output.exp();
    out.mul_(joined(grad.sum(dims, /*keepdim=*/true), spec, dims, ReduceOp::kSum).neg()).add_(grad);
  } else {
    const at::Tensor mine = sum_of_parts(
        output, dims, [&](const Part& part) { return (part.of(grad) * part.of(output)).sum(dims, /*keepdim=*/true); });
    out = (grad - joined(mine, spec, dims, ReduceOp::kSum)).mul_(output);
  }
  stack.assign({out.to(call.outputs[0]->dtype)});
}

// Runs logsumexp(self, dim, keepdim). An infinite element is not subtracted.
void logsumexp(const LocalCall& call, Stack& stack) {
  const Spec& spec = *call.inputs[0];
  const std::vector<int64_t> dims = reduced_dims(stack[1], spec.ndim());
  const at::Tensor piece = widened(stack[0].toTensor());
  const at::Tensor greatest = greatest_of_all(piece, spec, dims);
  const at::Tensor shift = greatest.masked_fill(greatest.isfinite().logical_not(), 0);
  const at::Tensor mine = sum_of_parts(piece, dims, [&](const Part& part) {
    return (part.of(piece) - part.of(shift)).exp_().sum(dims, /*keepdim=*/true);
  });
  const at::Tensor out = joined(mine, spec, dims, ReduceOp::kSum).log() + shift;
  stack.assign({out.to(call.outputs[0]->dtype).reshape(call.outputs[0]->local_sizes)});
}

[[maybe_unused]] const bool kRegistered =
    register_local_kernel("softmax", softmax, {.communicates = true, .rearranges = true}) &&
    register_local_kernel("softmax_backward", softmax_backward, {.communicates = true, .rearranges = true}) &&
    register_local_kernel("logsumexp", logsumexp, {.communicates = true, .rearranges = true});

}  // namespace
}  // namespace tessera
