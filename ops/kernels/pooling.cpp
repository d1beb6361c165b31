// This file has the local kernel "pooling": it computes maxima and means over windows, and their gradients, on a
// piece's rows and the rows that their windows use.

#include <algorithm>
#include <limits>
#include <string>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "tessera/ops/kernels/windows.h"

namespace tessera {
namespace {

using torch::jit::Stack;
using Rows = std::vector<WindowRows>;

// Half types are summed in single precision.
at::Tensor precise(const at::Tensor& t) { return at::isReducedFloatingType(t.scalar_type()) ? t.to(at::kFloat) : t; }

// Runs the operator on rows that include the padding: it pads nothing, and computes as many windows as fit.
void run_unpadded(const LocalCall& call, Stack& stack) {
  named(call, stack, "padding") = std::vector<int64_t>(call.fetched->halos.dims.size(), 0);
  named(call, stack, "ceil_mode") = false;
  call.op.callBoxed(stack);
}

at::Scalar lowest(at::ScalarType type) {
  if (c10::isFloatingType(type)) return -std::numeric_limits<double>::infinity();
  if (type == at::kByte) return 0;
  const int bits = static_cast<int>(c10::elementSize(type)) * 8;
  return std::numeric_limits<int64_t>::min() >> (64 - bits);
}

// ---- maxima; an index counts all elements row-major

// Converts an index that counts rows from `span` in each dimension to one that counts all rows of `window.wide_size`.
at::Tensor global_indices(at::Tensor indices, const Rows& rows) {
  at::Tensor out = at::zeros(indices.sizes(), indices.options());
  int64_t step = 1;
  for (auto r = rows.rbegin(); r != rows.rend(); ++r) {
    at::Tensor place = indices.remainder(r->span.size()) + r->span.begin;
    indices = indices.div(r->span.size(), "floor");
    // A window in which nothing exceeds the padding's value points to its first position that is no padding.
    const int64_t d = r->window.dilation;
    place = at::where(place < 0, place.remainder(d), place);
    out += place * step;
    step *= r->window.wide_size;
  }
  return out;
}

// Maps (self, ...) to (maxima, indices).
void max_pool(const LocalCall& call, Stack& stack, const Rows& rows) {
  const at::Tensor self = stack[0].toTensor();
  stack[0] = reframed(self, rows, &WindowRows::wide, &WindowRows::span, lowest(self.scalar_type())).contiguous();
  run_unpadded(call, stack);
  stack[1] = global_indices(stack[1].toTensor(), rows);
}

// The arguments are (grad, self, ..., indices). The part of the fetched gradients that belongs to this rank's rows is
// used.
void max_pool_backward(const LocalCall& call, Stack& stack, const Rows& rows) {
  const at::Tensor grad = stack[0].toTensor();
  at::Tensor indices = named(call, stack, "indices").toTensor();
  at::Tensor place = at::zeros(indices.sizes(), indices.options());
  at::Tensor here = at::ones(indices.sizes(), indices.options().dtype(at::kBool));
  int64_t step = 1;
  for (auto r = rows.rbegin(); r != rows.rend(); ++r) {
    const at::Tensor row = indices.remainder(r->window.wide_size);
    indices = indices.div(r->window.wide_size, "floor");
    here = here.logical_and(row >= r->wide.begin).logical_and(row < r->wide.end);
    place += (row - r->wide.begin) * step;
    step *= r->wide.size();
  }
  const auto leading = static_cast<int64_t>(grad.dim()) - static_cast<int64_t>(rows.size());
  const auto flat = [&](const at::Tensor& t) { return t.flatten(leading); };
  std::vector<int64_t> sizes = call.outputs[0]->local_sizes;
  const at::Tensor source = precise(grad).masked_fill(here.logical_not(), 0);
  const at::Tensor out = at::zeros(sizes, source.options());
  flat(out).scatter_add_(-1, flat(place.masked_fill(here.logical_not(), 0)), flat(source));
  stack = {out.to(grad.scalar_type())};
}

// ---- means: a sum divided by the number of elements of the global tensor that the window counts

// Returns the number of elements that each window of the narrow rows counts in one dimension, in a shape that
// broadcasts over `sums`. It is computed on their device: a copy from the host would wait for a GPU.
at::Tensor counts(const WindowRows& r, bool with_padding, const at::Tensor& sums) {
  const rules::Window& w = r.window;
  const at::Tensor begin =
      at::arange(r.narrow.begin, r.narrow.end, sums.options().dtype(at::kLong)).mul_(w.stride).sub_(w.padding);
  const at::Tensor end = (begin + w.kernel).clamp_max_(w.wide_size + (with_padding ? w.padding : 0));
  std::vector<int64_t> shape(static_cast<std::size_t>(sums.dim()), 1);
  shape[static_cast<std::size_t>(r.dim)] = -1;
  return (end - (with_padding ? begin : begin.clamp_min(0))).clamp_min_(1).view(shape);
}

// Returns `sums` of the narrow rows divided by their divisors.
at::Tensor divided(const LocalCall& call, Stack& stack, const Rows& rows, const at::Tensor& sums) {
  const auto mode =
      at::isIntegralType(sums.scalar_type(), false) ? std::optional<std::string_view>("trunc") : std::nullopt;
  const auto fixed = named(call, stack, "divisor_override").toOptional<int64_t>();
  if (fixed) return at::div(sums, *fixed, mode);
  const bool with_padding = named(call, stack, "count_include_pad").toBool();
  at::Tensor divisor = counts(rows.front(), with_padding, sums);
  for (std::size_t k = 1; k < rows.size(); ++k) divisor = divisor * counts(rows[k], with_padding, sums);
  return at::div(sums, divisor.to(sums.scalar_type()), mode);
}

// The arguments are (self, ...).
void avg_pool(const LocalCall& call, Stack& stack, const Rows& rows) {
  const at::Tensor self = stack[0].toTensor();
  Stack local = stack;
  local[0] = reframed(precise(self), rows, &WindowRows::wide, &WindowRows::span).contiguous();
  named(call, local, "divisor_override") = 1;
  run_unpadded(call, local);
  stack = {divided(call, stack, rows, local[0].toTensor()).to(self.scalar_type())};
}

// The arguments are (grad, self, ...).
void avg_pool_backward(const LocalCall& call, Stack& stack, const Rows& rows) {
  const at::Tensor grad = stack[0].toTensor();
  Stack local = stack;
  local[0] = divided(call, stack, rows, precise(grad)).contiguous();
  std::vector<int64_t> sizes = stack[1].toTensor().sizes().vec();
  for (const WindowRows& r : rows) sizes[static_cast<std::size_t>(r.dim)] = r.span.size();
  local[1] = at::empty(sizes, local[0].toTensor().options());  // only its sizes are read
  named(call, local, "divisor_override") = 1;
  run_unpadded(call, local);
  const at::Tensor spanned = local[0].toTensor();
  stack = {reframed(spanned, rows, &WindowRows::span, &WindowRows::wide).to(grad.scalar_type())};
}

void pooling(const LocalCall& call, Stack& stack) {
  const Rows rows = window_rows(call);
  const std::string& name = call.op.schema().name();
  const bool max = name.find("max") != std::string::npos;
  if (name.ends_with("_backward")) {
    if (no_rows(rows)) {
      stack = {at::zeros(call.outputs[0]->local_sizes, stack[0].toTensor().options())};
    } else {
      max ? max_pool_backward(call, stack, rows) : avg_pool_backward(call, stack, rows);
    }
  } else {
    max ? max_pool(call, stack, rows) : avg_pool(call, stack, rows);
  }
}

[[maybe_unused]] const bool kRegistered = register_local_kernel("pooling", pooling, {.rearranges = true});

}  // namespace
}  // namespace tessera
