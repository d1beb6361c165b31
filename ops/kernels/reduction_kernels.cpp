// This file has the local kernels of reductions. Some leave terms of the result for a later reduction; others join what
// ranks find in their pieces.

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/max.h>
#include <ATen/ops/min.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/ops/kernels/arguments.h"
#include "tessera/ops/kernels/held_elements.h"
#include "tessera/ops/kernels/joined_pieces.h"

namespace tessera {
namespace {

using torch::jit::Stack;

// For mean(self, *, dtype) and mean.dim(self, dim, keepdim, *, dtype) this divides the local sum by the global count,
// so that uneven and empty pieces have the right weight.
void mean(const LocalCall& call, Stack& stack) {
  const bool by_dim = stack.size() == 4;
  const at::Tensor self = stack[0].toTensor();
  const auto dtype = stack.back().toOptional<at::ScalarType>();
  const std::vector<int64_t> dims = reduced_dims(by_dim ? stack[1] : at::IValue(), self.dim());
  const int64_t count = reduced_count(call.inputs[0]->sizes, dims);
  const bool keepdim = by_dim && stack[2].toBool();
  const at::ScalarType type = dtype.value_or(self.scalar_type());
  const at::Tensor sum = at::sum(self, dims, keepdim, has_16_bits(type) ? at::kFloat : type);
  stack.assign({sum.div_(static_cast<double>(count)).to(type)});
}

// Returns the neutral element of a maximum, or of a minimum.
at::Scalar neutral(at::ScalarType type, bool of_maximum) {
  if (c10::isFloatingType(type)) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    return of_maximum ? -kInfinity : kInfinity;
  }
  if (type == at::kBool) return !of_maximum;
  if (type == at::kByte) return of_maximum ? 0 : 255;
  const auto bits = static_cast<int>(c10::elementSize(type)) * 8;
  return of_maximum ? std::numeric_limits<int64_t>::min() >> (64 - bits)
                    : std::numeric_limits<int64_t>::max() >> (64 - bits);
}

// For amax, amin, max, min and aminmax an empty piece gives the neutral element of each reduction.
void extremum(const LocalCall& call, Stack& stack) {
  const at::Tensor self = stack[0].toTensor();
  if (self.numel() != 0) {
    call.op.callBoxed(stack);
    return;
  }
  const bool is_maximum = call.op.schema().name().find("max") != std::string::npos;
  Stack results;
  for (const SpecPtr& out : call.outputs) {
    const bool of_maximum =
        call.outputs.size() == 1 ? is_maximum : !results.empty();  // aminmax gives the minimum first
    results.emplace_back(at::full(out->local_sizes, neutral(out->dtype, of_maximum), self.options()));
  }
  stack = std::move(results);
}

// Holds elements that were chosen from each line, and their global indices; kNowhere stands for none.
struct Chosen {
  at::Tensor value;
  at::Tensor index;
};
constexpr int64_t kNowhere = std::numeric_limits<int64_t>::max();

// Returns the row-major global indices of the elements at row-major positions `local` of a piece.
at::Tensor flat_indices(const at::Tensor& local, const Spec& spec) {
  const std::vector<int64_t> strides = contiguous_strides(spec.sizes);
  at::Tensor out = at::zeros_like(local), rest = local;
  for (std::size_t d = spec.sizes.size(); d-- > 0;) {
    out += detail::elements_at(rest.remainder(spec.local_sizes[d]), spec.tile[d]) * strides[d];
    rest = rest.floor_divide(spec.local_sizes[d]);
  }
  return out;
}

// Returns the extrema of this rank's piece along `dim`, or of all of it.
Chosen extremum_of_piece(const at::Tensor& piece, const Spec& spec, std::optional<int64_t> dim, bool largest) {
  const at::Tensor lines = dim ? piece : piece.reshape(-1);
  const int64_t along = dim.value_or(0);
  if (lines.size(along) == 0) {
    std::vector<int64_t> sizes = lines.sizes().vec();
    sizes[static_cast<std::size_t>(along)] = 1;
    return {.value = at::full(sizes, neutral(spec.dtype, largest), lines.options()),
            .index = at::full(sizes, kNowhere, lines.options().dtype(at::kLong))};
  }
  const auto [value, index] = largest ? at::max(lines, along, true) : at::min(lines, along, true);
  const at::Tensor global =
      dim ? detail::elements_at(index, spec.tile[static_cast<std::size_t>(along)]) : flat_indices(index, spec);
  return {.value = value, .index = global};
}

// Joins the extrema of all ranks: of equal ones, and of several NaNs, it takes the first in the tensor.
Chosen of_all_pieces(const Chosen& mine, const Spec& spec, const std::vector<int64_t>& dims, bool largest) {
  const at::Tensor best = joined(mine.value, spec, dims, largest ? ReduceOp::kMax : ReduceOp::kMin);
  at::Tensor is_best = mine.value == best;
  // If one is NaN, so is the best, and equal to none.
  if (c10::isFloatingType(spec.dtype)) is_best = is_best.logical_or(mine.value.isnan());
  const at::Tensor index = mine.index.masked_fill(is_best.logical_not(), kNowhere);
  return {.value = best, .index = joined(index, spec, dims, ReduceOp::kMin)};
}

// Runs argmax(self, dim, keepdim), argmin, max.dim and min.dim on pieces of the dimensions that are reduced. Runs two
// all_reduces, of the extrema and of their indices.
void extremum_index(const LocalCall& call, Stack& stack) {
  const Spec& spec = *call.inputs[0];
  const std::vector<int64_t> dims = reduced_dims(stack[1], spec.ndim());
  const auto dim = stack[1].isInt() ? std::optional(dims.front()) : std::nullopt;
  const bool largest = call.op.schema().name().find("max") != std::string::npos;
  const Chosen mine = extremum_of_piece(stack[0].toTensor(), spec, dim, largest);
  const Chosen found = of_all_pieces(mine, spec, dims, largest);
  const at::Tensor index = found.index.view(call.outputs.back()->local_sizes);
  if (call.outputs.size() == 1) {
    stack.assign({index});
  } else {
    stack.assign({found.value.view(call.outputs[0]->local_sizes), index});
  }
}

// Returns the `k` greatest or smallest elements of each line of the piece, sorted. Where it has fewer, others follow
// that come last in any order.
Chosen top_of_piece(const at::Tensor& piece, const Spec& spec, int64_t dim, int64_t k, bool largest) {
  std::vector<int64_t> sizes = piece.sizes().vec();
  const int64_t here = std::min(k, piece.size(dim));
  sizes[static_cast<std::size_t>(dim)] = k - here;
  const bool is_smallest_float = !largest && c10::isFloatingType(spec.dtype);  // of these, NaN comes last
  const at::Scalar last = is_smallest_float ? std::numeric_limits<double>::quiet_NaN() : neutral(spec.dtype, largest);
  Chosen out{.value = at::full(sizes, last, piece.options()),
             .index = at::full(sizes, kNowhere, piece.options().dtype(at::kLong))};
  if (here == 0) return out;
  const auto [value, index] = at::topk(piece, here, dim, largest, /*sorted=*/true);
  const at::Tensor global = detail::elements_at(index, spec.tile[static_cast<std::size_t>(dim)]);
  return {.value = at::cat({value, out.value}, dim), .index = at::cat({global, out.index}, dim)};
}

// Runs topk(self, k, dim, largest, sorted) on pieces of the dimension. Runs two all_gathers, of each piece's elements
// and of their indices. Of equal elements that several ranks offer the first in the tensor are taken.
void topk(const LocalCall& call, Stack& stack) {
  const Spec& spec = *call.inputs[0];
  const int64_t k = stack[1].toInt(), dim = reduced_dims(stack[2], spec.ndim()).front();
  const bool largest = stack[3].toBool();
  const DeviceMesh mesh = joining_mesh(spec, {dim});
  const auto of_all = [&](const at::Tensor& mine) {
    return all_gather(mine, mesh, 0).movedim(0, dim).flatten(dim, dim + 1);
  };
  const Chosen mine = top_of_piece(stack[0].toTensor(), spec, dim, k, largest);
  const at::Tensor values = of_all(mine.value), indices = of_all(mine.index);
  // In the order of the tensor, what stands for no element is last, and comes after its equals in a stable sort.
  const auto [index, order] = indices.sort(dim);
  const auto [value, sorted] = values.gather(dim, order).sort(/*stable=*/true, dim, /*descending=*/largest);
  stack.assign({value.narrow(dim, 0, k).contiguous(), index.gather(dim, sorted.narrow(dim, 0, k))});
}

// Runs var.correction(self, dim, *, correction, keepdim), std, var_mean and std_mean on pieces of the dimensions that
// are reduced.
void deviation(const LocalCall& call, Stack& stack) {
  const Spec& spec = *call.inputs[0];
  const std::vector<int64_t> dims = reduced_dims(stack[1], spec.ndim());
  const double correction = stack[2].isNone() ? 1 : stack[2].toScalar().toDouble();
  const Moments moments = moments_of_all(stack[0].toTensor(), spec, dims);
  const double divisor = static_cast<double>(reduced_count(spec.sizes, dims)) - correction;
  at::Tensor result = moments.squares / std::max(divisor, 0.0);
  if (call.op.schema().name().starts_with("aten::std")) result = result.sqrt();
  stack.assign({result.to(call.outputs[0]->dtype).view(call.outputs[0]->local_sizes)});
  if (call.outputs.size() == 1) return;
  const at::Tensor mean =
      !c10::isComplexType(spec.dtype) ? moments.mean : at::view_as_complex(moments.mean.contiguous());
  stack.emplace_back(mean.to(spec.dtype).reshape(call.outputs[1]->local_sizes));
}

[[maybe_unused]] const bool kRegistered =
    register_local_kernel("mean", mean) && register_local_kernel("extremum", extremum) &&
    register_local_kernel("extremum_index", extremum_index, {.communicates = true, .rearranges = true}) &&
    register_local_kernel("topk", topk, {.communicates = true, .rearranges = true}) &&
    register_local_kernel("deviation", deviation, {.communicates = true, .rearranges = true});

}  // namespace
}  // namespace tessera
