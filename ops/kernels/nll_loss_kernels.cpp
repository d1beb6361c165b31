// This file has the local kernels of the negative log likelihood: of a mean over pieces of the batch, and of pieces of
// the classes.

#include <algorithm>
#include <optional>
#include <string>

#include <ATen/TensorOperators.h>
#include <ATen/ops/nll_loss2d_forward.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/dtensor/dispatch/local_kernel.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/ops/kernels/arguments.h"
#include "tessera/ops/kernels/held_elements.h"
#include "tessera/ops/kernels/masked_rows.h"

namespace tessera {
namespace {

using torch::jit::Stack;

constexpr int64_t kNone = 0, kMean = 1, kSum = 2;

int64_t classes_dim(const Spec& scores) { return scores.ndim() == 1 ? 0 : 1; }

bool cuts_classes(const Spec& scores) {
  return std::ranges::any_of(scores.placements,
                             [&](const Placement& p) { return p.is_shard() && p.tensor_dim() == classes_dim(scores); });
}

// Returns the total weight of all pieces of the batch. Runs one all_reduce of one number on each mesh dimension that
// cuts it.
at::Tensor of_whole_batch(at::Tensor total, const Spec& scores) {
  for (std::size_t i = 0; i < scores.placements.size(); ++i) {
    const Placement& p = scores.placements[i];
    if (p.is_shard() && p.tensor_dim() != classes_dim(scores)) {
      total = all_reduce(total, scores.mesh, static_cast<int64_t>(i), ReduceOp::kSum);
    }
  }
  return total;
}

// Returns the weight of each of `given`, 0 where it is ignored; without weights, in float32.
at::Tensor weights_of(const at::Tensor& given, const std::optional<at::Tensor>& weight, int64_t ignore_index) {
  const at::Tensor target = given.to(at::kLong);  // which holds every ignore_index
  const at::Tensor counts = target.ne(ignore_index);
  if (!weight || !weight->defined()) return counts.to(at::kFloat);
  const at::ScalarType type = has_16_bits(weight->scalar_type()) ? at::kFloat : weight->scalar_type();
  const at::Tensor ignored = counts.logical_not();
  const at::Tensor known = target.masked_fill(ignored, 0);
  return weight->to(type).index_select(0, known.flatten()).view_as(known).masked_fill(ignored, 0);
}

// Holds, of each element, its place among the classes that this rank has, 0 where another rank has its class or it is
// ignored; and its weight, 0 there.
struct Targets {
  at::Tensor place;   // [n, 1, rest...]
  at::Tensor here;    // likewise
  at::Tensor weight;  // [n, rest...]: also of classes of other ranks; float64 beside such scores, else float32
};

Targets targets_here(const Spec& scores, const at::Tensor& given, const std::optional<at::Tensor>& weight,
                     int64_t ignore_index) {
  const auto dim = static_cast<std::size_t>(classes_dim(scores));
  const at::Tensor target = given.to(at::kLong);
  const at::Tensor ignored = target.eq(ignore_index);
  const at::Tensor known = target.masked_fill(ignored, 0);
  detail::check_indices(known, {0, scores.sizes[dim]}, "nll_loss", "the classes");
  const at::Tensor place = detail::places_of(known, scores.tile[dim], -1).masked_fill(ignored, -1);
  const at::Tensor by_class = place.unsqueeze(classes_dim(scores));
  const at::ScalarType type = scores.dtype == at::kDouble ? at::kDouble : at::kFloat;
  return {.place = by_class.clamp_min(0),
          .here = by_class >= 0,
          .weight = weights_of(target, weight, ignore_index).to(type)};
}

// Runs nll_loss_forward(self, target, weight, reduction, ignore_index) and nll_loss2d_forward on pieces of the classes.
// An element whose class another rank has adds nothing.
void nll_loss_of_classes(const LocalCall& call, Stack& stack) {
  const Spec& spec = *call.inputs[0];
  const at::Tensor self = stack[0].toTensor();
  const int64_t reduction = stack[3].toInt(), dim = classes_dim(spec);
  const Targets targets = targets_here(spec, stack[1].toTensor(), stack[2].toOptional<at::Tensor>(), stack[4].toInt());
  at::Tensor loss = at::zeros_like(targets.weight);
  if (self.size(dim) > 0) {
    const at::Tensor score = self.gather(dim, targets.place).squeeze(dim).to(loss.scalar_type());
    loss = at::where(targets.here.squeeze(dim), -score * targets.weight, 0);
  }
  at::Tensor total = reduction == kNone ? at::zeros({}, loss.options()) : targets.weight.sum();
  if (reduction != kNone) loss = loss.sum();
  if (reduction == kMean) {
    total = of_whole_batch(total, spec);
    loss = loss / total;
  }
  stack.assign({loss.to(self.scalar_type()), total.to(self.scalar_type())});
}

// Runs nll_loss_forward and nll_loss2d_forward with a mean: divides the local sum by the total weight of all pieces.
void nll_loss(const LocalCall& call, Stack& stack) {
  if (cuts_classes(*call.inputs[0])) return nll_loss_of_classes(call, stack);
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
    total = weights_of(target, weight, ignore_index).sum();
  }
  total = of_whole_batch(total, *call.inputs[0]);
  stack.assign({(loss / total).to(self.scalar_type()), total.to(self.scalar_type())});
}

// Runs nll_loss_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight) and
// nll_loss2d_backward on pieces of the classes: each element's gradient is at its class, on the rank that has it.
void nll_loss_backward(const LocalCall& call, Stack& stack) {
  const Spec& spec = *call.inputs[1];
  const at::Tensor grad = stack[0].toTensor(), self = stack[1].toTensor();
  const int64_t reduction = stack[4].toInt(), dim = classes_dim(spec);
  const Targets targets = targets_here(spec, stack[2].toTensor(), stack[3].toOptional<at::Tensor>(), stack[5].toInt());
  at::Tensor out = at::zeros(self.sizes(), self.options());
  if (self.size(dim) > 0) {
    at::Tensor each = grad.to(targets.weight.scalar_type());
    if (reduction == kMean) each = each / stack[6].toTensor();
    const at::Tensor value = (-each * targets.weight).to(self.scalar_type()).unsqueeze(dim);
    out.scatter_(dim, targets.place, at::where(targets.here, value, 0));
  }
  stack.assign({out});
}

[[maybe_unused]] const bool kRegistered =
    register_local_kernel("nll_loss", nll_loss, {.communicates = true}) &&
    register_local_kernel("nll_loss_of_classes", nll_loss_of_classes) &&
    register_local_kernel("nll_loss_backward", nll_loss_backward, {.rearranges = true});

}  // namespace
}  // namespace tessera
