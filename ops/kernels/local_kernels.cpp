// This file has the local kernels that rules name, for operators whose piece of the result is not the operator on the
// pieces.

#include <algorithm>

#include <ATen/TensorOperators.h>
#include <ATen/ceil_div.h>
#include <ATen/ops/nll_loss2d_forward.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/ops/kernels/masked_rows.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// Says whether sums in this dtype are added in float32, since they may overflow where means do not.
bool has_16_bits(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// For mean(self, *, dtype) and mean.dim(self, dim, keepdim, *, dtype) this divides the local sum by the global count,
// so that uneven and empty pieces have the right weight.
void mean(const LocalCall& call, Stack& stack) {
  const bool by_dim = stack.size() == 4;
  const at::Tensor self = stack[0].toTensor();
  const auto dtype = stack.back().toOptional<at::ScalarType>();
  std::vector<int64_t> dims;
  if (by_dim && stack[1].isIntList()) dims = stack[1].toIntVector();
  if (dims.empty()) {
    for (int64_t d = 0; d < self.dim(); ++d) dims.push_back(d);
  }
  int64_t count = 1;
  for (const int64_t d : dims) count *= call.inputs[0]->sizes.at(static_cast<std::size_t>(d < 0 ? d + self.dim() : d));
  const bool keepdim = by_dim && stack[2].toBool();
  const at::ScalarType type = dtype.value_or(self.scalar_type());
  const at::Tensor sum = at::sum(self, dims, keepdim, has_16_bits(type) ? at::kFloat : type);
  stack.assign({sum.div_(static_cast<double>(count)).to(type)});
}

// For amax, amin, max and min an empty piece gives the neutral element of the reduction.
void extremum(const LocalCall& call, Stack& stack) {
  const at::Tensor self = stack[0].toTensor();
  if (self.numel() != 0) {
    call.op.callBoxed(stack);
    return;
  }
  const std::string& name = call.op.schema().name();
  const bool largest = name.find("max") != std::string::npos;
  const Spec& out = *call.outputs[0];
  at::Tensor result = at::zeros(out.local_sizes, self.options());
  if (c10::isFloatingType(out.dtype)) {
    result.fill_(largest ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity());
  } else if (out.dtype == at::kBool) {
    result.fill_(!largest);
  } else {
    const int bits = static_cast<int>(self.element_size()) * 8;
    const bool is_unsigned = out.dtype == at::kByte;
    const int64_t low = is_unsigned ? 0 : std::numeric_limits<int64_t>::min() >> (64 - bits);
    const int64_t high = is_unsigned ? 255 : std::numeric_limits<int64_t>::max() >> (64 - bits);
    result.fill_(largest ? low : high);
  }
  stack.assign({result});
}

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

// Returns the sum of the weights of those of `given` that count, in float32.
at::Tensor counted_weight(const at::Tensor& given, const std::optional<at::Tensor>& weight, int64_t ignore_index) {
  const at::Tensor target = given.to(at::kLong);  // which holds every ignore_index
  const at::Tensor counts = target.ne(ignore_index);
  if (!weight || !weight->defined()) return counts.sum(at::kFloat);
  const at::Tensor each = weight->to(at::kFloat).index_select(0, target.masked_fill(counts.logical_not(), 0).flatten());
  return each.mul(counts.flatten()).sum();
}

// Runs nll_loss_forward(self, target, weight, reduction = mean, ignore_index) and nll_loss2d_forward on pieces of the
// batch: divides the local sum by the global total weight. Runs one all_reduce of one number on each mesh dimension
// that cuts the batch.
void nll_loss_mean(const LocalCall& call, Stack& stack) {
  constexpr int64_t kNone = 0, kSum = 2;
  const at::Tensor self = stack[0].toTensor(), target = stack[1].toTensor();
  const auto weight = stack[2].toOptional<at::Tensor>();
  const int64_t ignore_index = stack[4].toInt();
  const bool spatial = call.op.schema().name() == "aten::nll_loss2d_forward";
  const bool half = has_16_bits(self.scalar_type());
  const int64_t reduction = half ? kNone : kSum;
  auto [loss, total] = spatial ? at::nll_loss2d_forward(self, target, weight, reduction, ignore_index)
                               : at::nll_loss_forward(self, target, weight, reduction, ignore_index);
  if (half) {
    loss = loss.sum(at::kFloat);
    total = counted_weight(target, weight, ignore_index);
  }
  const Spec& spec = *call.inputs[0];
  for (std::size_t i = 0; i < spec.placements.size(); ++i) {
    if (spec.placements[i].is_shard()) total = all_reduce(total, spec.mesh, static_cast<int64_t>(i), ReduceOp::kSum);
  }
  stack.assign({(loss / total).to(self.scalar_type()), total.to(self.scalar_type())});
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
    register_local_kernel("attention_backward", attention_backward) && register_local_kernel("mean", mean) &&
    register_local_kernel("contiguous", contiguous,
                          {.writes_out = true, .rearranges = true, .makes_contiguous = true}) &&
    register_local_kernel("aligned_rows", aligned_rows, {.rearranges = true}) &&
    register_local_kernel("extremum", extremum) &&
    register_local_kernel("group_norm", group_norm, {.rearranges = true}) &&
    register_local_kernel("reshape", reshape) &&
    register_local_kernel("contiguous_statistics", contiguous_statistics, {.makes_contiguous = true}) &&
    register_local_kernel("embedding", embedding) &&
    register_local_kernel("embedding_dense_backward", embedding_dense_backward) &&
    register_local_kernel("nll_loss_mean", nll_loss_mean, {.communicates = true});

}  // namespace
}  // namespace tessera
