// This file has what works along the diagonal of two dimensions that are cut: the local kernels of diagonal, of its
// gradient, and of tril and triu; and trace, which is the sum of the diagonal. Each rank works on its own piece.

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/ops/kernels/arguments.h"
#include "tessera/ops/rules/view_tiles.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// Returns what a piece of a tensor with the layout `whole` has of the diagonal that the call names, of `length`
// elements, as a view. This must be one interval of the diagonal, or nothing.
at::Tensor diagonal_of(const at::Tensor& piece, const LocalCall& call, const Stack& stack, const Spec& whole,
                       int64_t length) {
  const auto number = [&](const char* name) {
    return stack[static_cast<std::size_t>(argument(call.op, name))].toInt();
  };
  const auto dim = [&](const char* name) {
    const int64_t asked = number(name);
    return asked < 0 ? asked + whole.ndim() : asked;
  };
  const int64_t offset = number("offset"), dim1 = dim("dim1"), dim2 = dim("dim2");
  const Intervals held = rules::diagonal_tiles(dim1, dim2, offset, length)(whole.tile)->back();
  if (held.empty()) return piece.diagonal(0, dim1, dim2).narrow(-1, 0, 0);
  const auto [row, column] = rules::diagonal_start(offset);
  const auto along = [&](const at::Tensor& t, int64_t d, int64_t first) {
    const Intervals& here = whole.tile[static_cast<std::size_t>(d)];
    return t.narrow(d, overlap(here, one_interval(0, held[0].begin + first)), held[0].size());
  };
  return along(along(piece, dim1, row), dim2, column).diagonal(0, dim1, dim2);
}

void diagonal(const LocalCall& call, Stack& stack) {
  const at::Tensor piece = stack[0].toTensor();
  const Spec& spec = *call.outputs[0];
  const at::Tensor part = diagonal_of(piece, call, stack, *call.inputs[0], spec.sizes.back());
  // A part without elements may have other sizes than its layout says.
  const bool fits = part.sizes() == at::IntArrayRef(spec.local_sizes);
  stack = {fits ? own_if_copy(call.op, part) : at::empty(spec.local_sizes, piece.options())};
}

// This is diagonal_backward and diag_embed.
void diagonal_backward(const LocalCall& call, Stack& stack) {
  const at::Tensor grad = stack[0].toTensor();
  const at::Tensor out = at::zeros(call.outputs[0]->local_sizes, grad.options());
  const at::Tensor part = diagonal_of(out, call, stack, *call.outputs[0], call.inputs[0]->sizes.back());
  if (part.numel() != 0) part.copy_(grad);
  stack = {out};
}

// Sets what is outside the triangle to zero, for each pair of an interval of rows and one of columns.
void keep_triangle(const at::Tensor& piece, const Intervals& rows, const Intervals& columns, bool lower,
                   int64_t diagonal) {
  int64_t row = 0;
  for (const Interval& i : rows) {
    int64_t column = 0;
    for (const Interval& j : columns) {
      at::Tensor block = piece.narrow(-2, row, i.size()).narrow(-1, column, j.size());
      const int64_t here = diagonal + i.begin - j.begin;
      lower ? block.tril_(here) : block.triu_(here);
      column += j.size();
    }
    row += i.size();
  }
}

// The operator runs on the piece with a diagonal of its own, where the piece is one block of the whole. Where it is
// several, the operator keeps what is left of them.
void triangle(const LocalCall& call, Stack& stack) {
  const Spec& spec = *call.inputs[0];
  const auto last = static_cast<std::size_t>(spec.ndim()) - 1;
  const Intervals& rows = spec.tile[last - 1];
  const Intervals& columns = spec.tile[last];
  const std::string& name = call.op.schema().name();
  const bool lower = name.starts_with("aten::tril");
  const int64_t none = -spec.sizes[last - 1], all = spec.sizes[last];  // of the lower triangle
  const int64_t diagonal = std::clamp(stack[1].toInt(), none, all);
  if (rows.size() == 1 && columns.size() == 1) {
    stack[1] = diagonal + rows[0].begin - columns[0].begin;
  } else {
    const at::Tensor self = stack[0].toTensor();
    at::Tensor kept = name.ends_with('_') ? self : self.clone();
    keep_triangle(kept, rows, columns, lower, diagonal);
    stack[0] = std::move(kept);
    stack[1] = lower ? all : none;
  }
  call.op.callBoxed(stack);
}

// LibTorch has no trace of bools.
bool trace(const c10::OperatorHandle& op, Stack& stack) {
  const at::Tensor self = take_args(op, stack)[0].toTensor();
  const auto is_shard = [](const Placement& p) { return p.is_shard(); };
  if (writes(op) || self.dim() != 2 || self.scalar_type() == at::kBool) return false;
  if (std::ranges::none_of(detail::meta(self).spec->placements, is_shard)) return false;
  give(op, stack, at::sum(self.diagonal()));
  return true;
}

[[maybe_unused]] const bool kRegistered =
    register_local_kernel("diagonal", diagonal) && register_local_kernel("diagonal_backward", diagonal_backward) &&
    register_local_kernel("triangle", triangle, {.writes_out = true}) && register_decomposition("trace", trace);

}  // namespace
}  // namespace tessera
