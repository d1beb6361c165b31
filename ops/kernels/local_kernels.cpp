// This file has the local kernels that rules name, for operators whose piece of the result is not the operator on the
// pieces.

#include <algorithm>

#include <ATen/TensorOperators.h>
#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/ops/kernels/masked_rows.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// Runs embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse) on this rank's rows. Rows of other ranks
// give zeros, since the results are summed.
void embedding(const LocalCall& call, Stack& stack) {
  const Spec& weight = *call.inputs[0];
  stack.assign({detail::masked_rows(stack[0].toTensor(), stack[1].toTensor(), {weight.tile[0], weight.sizes[0]})});
}

// For embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq) this computes this
// rank's rows of the gradient.
void embedding_dense_backward(const LocalCall& call, Stack& stack) {
  const Spec& weight = *call.outputs[0];
  stack.assign({detail::masked_rows_gradient(stack[0].toTensor(), stack[1].toTensor(),
                                             {weight.tile[0], weight.sizes[0]}, stack[3].toInt(), stack[4].toBool())});
}

// Returns input 0 with the local sizes of the result, for operators that would misread the piece's sizes or strides:
// squeeze removes dimensions of size 1, of which a piece may have more, and _reshape_alias names the global strides.
void reshape(const LocalCall& call, Stack& stack) {
  const at::Tensor self = stack[0].toTensor();
  stack.assign({own_if_copy(call.op, self.reshape(call.outputs[0]->local_sizes))});
}

// Backward kernels assume that what forward saved is contiguous and do not check its strides; a slice may not be.
void contiguous_statistics(const LocalCall& call, Stack& stack) {
  const auto& arguments = call.op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i].name();
    if (name == "mean" || name == "rstd" || name == "logsumexp") stack[i] = stack[i].toTensor().contiguous();
  }
  call.op.callBoxed(stack);
}

// Runs the operator on contiguous pieces: some LibTorch kernels read memory as if all tensors were contiguous.
void contiguous(const LocalCall& call, Stack& stack) {
  const auto& arguments = call.op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const bool writes = arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    if (stack[i].isTensor() && stack[i].toTensor().defined() && !writes) stack[i] = stack[i].toTensor().contiguous();
  }
  call.op.callBoxed(stack);
}

// Returns the matrices of `t` with rows, or columns, that begin at multiples of 16 bytes.
at::Tensor with_aligned_rows(const at::Tensor& t) {
  const bool by_columns = t.stride(-1) != 1 && t.stride(-2) == 1;
  const at::Tensor rows = by_columns ? t.mT() : t;
  const int64_t step = 16 / static_cast<int64_t>(t.element_size());
  const auto aligned = [&](int64_t dim) { return rows.stride(dim) % step == 0; };
  if (rows.stride(-1) == 1 && aligned(-2) && aligned(0)) return t;
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.back() = std::max<int64_t>(1, at::ceil_div(sizes.back(), step)) * step;
  const at::Tensor copy = at::empty(sizes, rows.options()).narrow(-1, 0, rows.size(-1)).copy_(rows);
  return by_columns ? copy.mT() : copy;
}

// _grouped_mm refuses matrices whose rows begin elsewhere; rows of a piece may.
void aligned_rows(const LocalCall& call, Stack& stack) {
  for (const std::size_t i : {0, 1}) stack[i] = with_aligned_rows(stack[i].toTensor());
  call.op.callBoxed(stack);
}

// Runs native_group_norm and its backward with N, C and group of the first tensor's piece. The kernels assume
// contiguous memory.
void group_norm(const LocalCall& call, Stack& stack) {
  const auto argument = [&](const char* name) -> at::IValue& {
    return stack[static_cast<std::size_t>(call.op.schema().argumentIndexWithName(name).value())];
  };
  const at::Tensor piece = stack[0].toTensor();
  const int64_t channels = argument("C").toInt();
  argument("N") = piece.size(0);
  argument("C") = piece.size(1);
  if (channels > 0) argument("group") = argument("group").toInt() * piece.size(1) / channels;
  for (at::IValue& value : stack) {
    if (value.isTensor()) value = value.toTensor().contiguous();
  }
  call.op.callBoxed(stack);
}

// Runs _scaled_dot_product_flash_attention_for_cpu_backward. The kernel divides by the number of heads, which may be 0
// here while the gradients of key and value are terms of a sum.
void attention_backward(const LocalCall& call, Stack& stack) {
  const at::Tensor grad = stack[0].toTensor();
  if (grad.numel() != 0) {
    contiguous_statistics(call, stack);
    return;
  }
  Stack zeros;
  for (const SpecPtr& spec : call.outputs) zeros.emplace_back(at::zeros(spec->local_sizes, grad.options()));
  stack = std::move(zeros);
}

[[maybe_unused]] const bool kRegistered =
    register_local_kernel("attention_backward", attention_backward) &&
    register_local_kernel("contiguous", contiguous,
                          {.writes_out = true, .rearranges = true, .makes_contiguous = true}) &&
    register_local_kernel("aligned_rows", aligned_rows, {.rearranges = true}) &&
    register_local_kernel("group_norm", group_norm, {.rearranges = true}) &&
    register_local_kernel("reshape", reshape) &&
    register_local_kernel("contiguous_statistics", contiguous_statistics, {.makes_contiguous = true}) &&
    register_local_kernel("embedding", embedding) &&
    register_local_kernel("embedding_dense_backward", embedding_dense_backward);

}  // namespace
}  // namespace tessera
