// This file has the local kernels of softmax, its logarithm and logsumexp on pieces of the dimensions along which they
// work: ranks join the greatest element and the sum of each line.

#include <limits>
#include <string>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/full.h>

#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/ops/kernels/arguments.h"
#include "tessera/ops/kernels/joined_pieces.h"

namespace tessera {
namespace {

using torch::jit::Stack;

at::Tensor widened(const at::Tensor& t) { return has_16_bits(t.scalar_type()) ? t.to(at::kFloat) : t; }

// Returns the greatest element of each line of all pieces. Runs one all_reduce of these, as sum_of_all does.
at::Tensor greatest_of_all(const at::Tensor& piece, const Spec& spec, const std::vector<int64_t>& dims) {
  std::vector<int64_t> sizes = piece.sizes().vec();
  for (const int64_t d : dims) sizes[static_cast<std::size_t>(d)] = 1;
  const bool empty = reduced_count(spec.local_sizes, dims) == 0;
  const at::Tensor mine = empty ? at::full(sizes, -std::numeric_limits<double>::infinity(), piece.options())
                                : at::amax(piece, dims, /*keepdim=*/true);
  return joined(mine, spec, dims, ReduceOp::kMax);
}
at::Tensor sum_of_all(const at::Tensor& piece, const Spec& spec, const std::vector<int64_t>& dims) {
  return joined(piece.sum(dims, /*keepdim=*/true), spec, dims, ReduceOp::kSum);
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
  at::Tensor out = piece - greatest;
  if (name == "aten::_log_softmax") {
    out.sub_(sum_of_all(out.exp(), spec, dims).log_());
  } else {
    out.exp_();
    out.div_(sum_of_all(out, spec, dims));
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
  const at::Tensor out = of_logarithm ? grad - output.exp() * sum_of_all(grad, spec, dims)
                                      : output * (grad - sum_of_all(grad * output, spec, dims));
  stack.assign({out.to(call.outputs[0]->dtype)});
}

// Runs logsumexp(self, dim, keepdim). An infinite element is not subtracted.
void logsumexp(const LocalCall& call, Stack& stack) {
  const Spec& spec = *call.inputs[0];
  const std::vector<int64_t> dims = reduced_dims(stack[1], spec.ndim());
  const at::Tensor piece = widened(stack[0].toTensor());
  const at::Tensor greatest = greatest_of_all(piece, spec, dims);
  const at::Tensor shift = greatest.masked_fill(greatest.isfinite().logical_not(), 0);
  const at::Tensor out = sum_of_all((piece - shift).exp_(), spec, dims).log_().add_(shift);
  stack.assign({out.to(call.outputs[0]->dtype).reshape(call.outputs[0]->local_sizes)});
}

[[maybe_unused]] const bool kRegistered =
    register_local_kernel("softmax", softmax, {.communicates = true, .rearranges = true}) &&
    register_local_kernel("softmax_backward", softmax_backward, {.communicates = true, .rearranges = true}) &&
    register_local_kernel("logsumexp", logsumexp, {.communicates = true, .rearranges = true});

}  // namespace
}  // namespace tessera
