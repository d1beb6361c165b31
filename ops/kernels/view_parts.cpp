// This file has the local kernels "parts" and "parts_backward": slice, split, select and unbind along a dimension that
// is cut, and their gradients. Each rank works on its own piece.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/ops/rules/rule.h"
#include "tessera/ops/rules/view_tiles.h"

namespace tessera {
namespace {

using torch::jit::Stack;

int64_t argument(const LocalCall& call, const Stack& stack, const char* name, int64_t otherwise) {
  const auto at = call.op.schema().argumentIndexWithName(name);
  if (!at || stack[static_cast<std::size_t>(*at)].isNone()) return otherwise;
  return stack[static_cast<std::size_t>(*at)].toInt();
}

// Describes a dimension of the viewed tensor, and what this rank holds of it.
struct Viewed {
  int64_t dim;
  int64_t size;  // of the global tensor
  const Intervals& held;
};

Viewed viewed(const LocalCall& call, const Stack& stack, const Spec& spec) {
  const int64_t asked = argument(call, stack, "dim", 0);
  const int64_t dim = asked < 0 ? asked + spec.ndim() : asked;
  const auto d = static_cast<std::size_t>(dim);
  return {.dim = dim, .size = spec.sizes[d], .held = spec.tile[d]};
}

// Returns the position in a piece of its first element at or after `element`.
int64_t place_of(const Intervals& held, int64_t element) { return count(intersect(held, one_interval(0, element))); }

bool has(const Intervals& held, int64_t element) { return overlap(held, one_interval(element, element + 1)) != 0; }

// Returns those of the elements start, start + step, ... (`length` of them) that are in the piece.
at::Tensor slice_of(const at::Tensor& piece, const Viewed& v, int64_t start, int64_t step, int64_t length) {
  const Tile held = *rules::slice_tiles(0, start, step, length)(Tile{v.held});
  if (held[0].empty()) return piece.narrow(v.dim, 0, 0);
  const int64_t first = place_of(v.held, start + held[0].front().begin * step);
  return piece.slice(v.dim, first, first + (count(held[0]) - 1) * step + 1, step);
}

// Returns an undefined tensor if this rank does not have the element.
at::Tensor element_of(const at::Tensor& piece, const Viewed& v, int64_t index) {
  return has(v.held, index) ? piece.select(v.dim, place_of(v.held, index)) : at::Tensor();
}

// Calls visit(index of the result, its part of `piece`) for each result of a view of a tensor with the sizes of
// `whole`.
template <class Visit>
void each_part(const LocalCall& call, const Stack& stack, const Spec& whole, const std::vector<SpecPtr>& parts,
               const at::Tensor& piece, const Visit& visit) {
  const Viewed v = viewed(call, stack, whole);
  const bool drops = parts[0]->ndim() < whole.ndim();
  const int64_t index = argument(call, stack, "index", 0);
  const auto start_at = call.op.schema().argumentIndexWithName("start");
  int64_t start =
      start_at ? rules::slice_start(stack[static_cast<std::size_t>(*start_at)].toOptional<int64_t>(), v.size) : 0;
  const int64_t step = argument(call, stack, "step", 1);
  for (std::size_t k = 0; k < parts.size(); ++k) {
    if (drops) {
      visit(k, element_of(piece, v, (index < 0 ? index + v.size : index) + static_cast<int64_t>(k)));
      continue;
    }
    const int64_t length = parts[k]->sizes[static_cast<std::size_t>(v.dim)];
    visit(k, slice_of(piece, v, start, step, length));
    start += length;
  }
}

void parts(const LocalCall& call, Stack& stack) {
  const at::Tensor piece = stack[0].toTensor();
  std::vector<at::Tensor> out(call.outputs.size());
  each_part(call, stack, *call.inputs[0], call.outputs, piece, [&](std::size_t k, const at::Tensor& part) {
    const Spec& spec = *call.outputs[k];
    // A part without elements may have other sizes than its layout says.
    const bool fits = part.defined() && part.sizes() == at::IntArrayRef(spec.local_sizes);
    out[k] = fits ? own_if_copy(call.op, part) : at::empty(spec.local_sizes, piece.options());
  });
  const bool list = call.op.schema().returns()[0].type()->kind() == c10::TypeKind::ListType;
  stack.clear();
  if (list) {
    stack.emplace_back(c10::List<at::Tensor>(out));
  } else {
    stack.emplace_back(out[0]);
  }
}

// This is select_backward and slice_backward.
void parts_backward(const LocalCall& call, Stack& stack) {
  const at::Tensor grad = stack[0].toTensor();
  const at::Tensor out = at::zeros(call.outputs[0]->local_sizes, grad.options());
  each_part(call, stack, *call.outputs[0], {call.inputs[0]}, out, [&](std::size_t, const at::Tensor& part) {
    if (part.defined() && part.numel() != 0) part.copy_(grad);
  });
  stack = {out};
}

[[maybe_unused]] const bool kRegistered =
    register_local_kernel("parts", parts) && register_local_kernel("parts_backward", parts_backward);

}  // namespace
}  // namespace tessera
