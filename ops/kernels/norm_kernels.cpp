// This file has the local kernels of layer norm on pieces of the dimensions that it normalizes: ranks join the moments
// of each line, and in backward two sums.

#include <array>
#include <cstdint>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>

#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/ops/kernels/arguments.h"
#include "tessera/ops/kernels/joined_pieces.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// Returns the last `count` of `ndim` dimensions, or those before them.
std::vector<int64_t> last_dims(int64_t ndim, int64_t count) {
  std::vector<int64_t> dims;
  for (int64_t d = ndim - count; d < ndim; ++d) dims.push_back(d);
  return dims;
}
std::vector<int64_t> first_dims(int64_t count) { return last_dims(count, count); }

// Runs native_layer_norm(input, normalized_shape, weight, bias, eps).
void layer_norm(const LocalCall& call, Stack& stack) {
  const Spec& spec = *call.inputs[0];
  const std::vector<int64_t> dims = last_dims(spec.ndim(), std::ssize(stack[1].toIntVector()));
  const at::Tensor piece = widened(stack[0].toTensor());
  const Moments moments = moments_of_all(piece, spec, dims);
  const auto count = static_cast<double>(reduced_count(spec.sizes, dims));
  const std::vector<int64_t>& sizes = call.outputs[1]->local_sizes;
  const at::Tensor mean = moments.mean.view(sizes);
  const at::Tensor rstd = (moments.squares / count + stack[4].toDouble()).rsqrt_().view(sizes);
  at::Tensor out = (piece - mean.to(piece.scalar_type())).mul_(rstd.to(piece.scalar_type()));
  if (const auto weight = stack[2].toOptional<at::Tensor>(); weight && weight->defined()) out.mul_(*weight);
  if (const auto bias = stack[3].toOptional<at::Tensor>(); bias && bias->defined()) out.add_(*bias);
  const at::ScalarType of_statistics = call.outputs[1]->dtype;
  stack = {out.to(spec.dtype), mean.to(of_statistics), rstd.to(of_statistics)};
}

// Runs native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask). With g the
// gradient of the result, w the weight, y the normalized input, and means over a line:
//   of the input  rstd (g w - mean(g w) - y mean(g w y)),  of the weight  sum(g y),  of the bias  sum(g)
void layer_norm_backward(const LocalCall& call, Stack& stack) {
  const Spec& spec = *call.inputs[1];
  const auto normalized = std::ssize(stack[2].toIntVector());
  const std::vector<int64_t> dims = last_dims(spec.ndim(), normalized);
  const std::vector<int64_t> rows = first_dims(spec.ndim() - normalized);
  const at::Tensor grad = widened(stack[0].toTensor());
  const at::ScalarType type = grad.scalar_type();
  const at::Tensor rstd = stack[4].toTensor().to(type);
  const at::Tensor y = (widened(stack[1].toTensor()) - stack[3].toTensor().to(type)).mul_(rstd);
  const auto weight = stack[5].toOptional<at::Tensor>();
  const auto asked = stack[7].toBoolList();
  std::array<at::Tensor, 3> out;
  if (asked[0]) {
    const at::Tensor scaled = weight && weight->defined() ? grad * weight->to(type) : grad;
    const at::Tensor mine = at::stack({scaled.sum(dims, /*keepdim=*/true), (scaled * y).sum(dims, /*keepdim=*/true)});
    const at::Tensor means =
        joined(mine, spec, dims, ReduceOp::kSum) / static_cast<double>(reduced_count(spec.sizes, dims));
    out[0] = (scaled - means[0]).sub_(y * means[1]).mul_(rstd).to(spec.dtype);
  }
  const auto over_rows = [&](const at::Tensor& t, const SpecPtr& of) {
    return (rows.empty() ? t : t.sum(rows)).to(of->dtype);
  };
  if (asked[1]) out[1] = over_rows(grad * y, call.outputs[1]);
  if (asked[2]) out[2] = over_rows(grad, call.outputs[2]);
  stack = {out[0], out[1], out[2]};
}

[[maybe_unused]] const bool kRegistered =
    register_local_kernel("layer_norm", layer_norm, {.communicates = true, .rearranges = true}) &&
    register_local_kernel("layer_norm_backward", layer_norm_backward, {.communicates = true, .rearranges = true});

}  // namespace
}  // namespace tessera
