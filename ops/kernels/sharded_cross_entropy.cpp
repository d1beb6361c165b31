#include "tessera/ops/kernels/sharded_cross_entropy.h"

#include <stdexcept>
#include <string>

#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/saved.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/device_checks.h"
#include "tessera/mesh/core/in_memory.h"
#include "tessera/mesh/core/wire.h"
#include "tessera/mesh/mesh_checks.h"
#include "tessera/ops/kernels/cross_entropy_rows.h"
#include "tessera/ops/kernels/logit_kernels.h"
#include "tessera/placement/partition.h"

namespace tessera {
namespace {

using cross_entropy::check_count;
using cross_entropy::differentiable_gradient;
using cross_entropy::gradient_in_parts;
using cross_entropy::kName;
using cross_entropy::Problem;
using cross_entropy::Rows;
using cross_entropy::rows_of;
using cross_entropy::sum_type;
using cross_entropy::Sums;
using cross_entropy::sums_of;
using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

// [*, k] -> [n, k]
at::Tensor by_rows(const at::Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : t.flatten(0, -2); }

detail::RowTargets row_targets(const at::Tensor& target, const Problem& p) {
  return {.of_row = row_major(target.reshape({-1})), .ignored = p.ignore_index, .classes = p.classes, .mine = p.mine};
}

// Returns the weights of the rows, undefined where they are all alike.
at::Tensor row_weights(const at::Tensor& target, const Problem& p, at::ScalarType type) {
  return p.weight.defined() ? rows_of(target, p, type).weight : at::Tensor();
}

struct ShardedCrossEntropy : torch::autograd::Function<ShardedCrossEntropy> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& target,
                            const Problem& p) {
    detail::saved<Problem>(ctx, "problem") = p;
    const at::Tensor flat = by_rows(logits);
    if (p.by_kernels) return forward_by_kernels(ctx, logits, flat, target, p);
    const Rows rows = rows_of(target, p, sum_type(logits.scalar_type()));
    const Sums sums = sums_of(flat, rows, p);
    // The classes' weights are saved too, so that autograd detects a later write.
    if (logits.requires_grad()) {
      ctx->save_for_backward({logits, target, sums.greatest, sums.exps, p.weight, at::Tensor()});
    }
    detail::saved<Problem>(ctx, "problem").weight.reset();
    switch (p.reduction) {
      case at::Reduction::Mean: return sums.loss.sum() / rows.weight.sum();
      case at::Reduction::Sum: return sums.loss.sum();
      default: return sums.loss.view(target.sizes());
    }
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    Problem p = detail::saved<Problem>(ctx, "problem");
    const tensor_list saved = ctx->get_saved_variables();
    p.weight = saved[4];
    const at::Tensor &logits = saved[0], &target = saved[1];
    const at::Tensor x = by_rows(logits);
    const bool by_kernels = p.by_kernels && detail::takes_logits(logits);  // they may have been saved in another layout
    if (!c10::GradMode::is_enabled() && by_kernels && !detail::has_tangent(grads[0])) {
      return {backward_by_kernels(x, grads[0], saved, p).view(logits.sizes()), at::Tensor(), at::Tensor()};
    }
    const Rows rows = rows_of(target, p, sum_type(logits.scalar_type()));
    const at::Tensor gradient = c10::GradMode::is_enabled()
                                    ? differentiable_gradient(x, grads[0], rows, p)
                                    : gradient_in_parts(x, grads[0], rows, p, saved[2], saved[3]);
    return {gradient.view(logits.sizes()), at::Tensor(), at::Tensor()};
  }

 private:
  static at::Tensor forward_by_kernels(AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& x,
                                       const at::Tensor& target, const Problem& p) {
    const detail::RowTargets targets = row_targets(target, p);
    const int64_t n = x.size(0);
    const detail::RowSums mine = detail::row_sums(x, targets);
    const at::Tensor of_all = all_reduce(mine.greatest, *p.mesh, 0, ReduceOp::kMax);
    const at::Tensor sums = all_reduce(detail::row_terms(mine, of_all, targets), *p.mesh, 0, ReduceOp::kSum);
    check_count(sums[2 * n], p);
    const at::Tensor losses = detail::row_losses(sums, row_weights(target, p, sums.scalar_type()), targets);
    const bool mean = p.reduction == at::Reduction::Mean;
    const at::Tensor totals = mean ? losses.sum(1) : at::Tensor();
    if (logits.requires_grad()) {
      ctx->save_for_backward({logits, target, of_all, sums.narrow(0, 0, n), p.weight, mean ? totals[1] : at::Tensor()});
    }
    detail::saved<Problem>(ctx, "problem").weight.reset();
    if (mean) return totals[0] / totals[1];
    return p.reduction == at::Reduction::Sum ? losses[0].sum() : losses[0].view(target.sizes());
  }

  static at::Tensor backward_by_kernels(const at::Tensor& x, const at::Tensor& grad, const tensor_list& saved,
                                        const Problem& p) {
    const at::ScalarType type = sum_type(x.scalar_type());
    return detail::logits_gradient(x,
                                   {.of_all = saved[2],
                                    .exps = saved[3],
                                    .weight = row_weights(saved[1], p, type),
                                    .gradient = in_memory(grad.to(type)).reshape({-1}),
                                    .total = saved[5]},
                                   row_targets(saved[1], p));
  }
};

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(fmt::format("{}: {}", kName, why)); }

void check_tensors(const at::Tensor& logits, const at::Tensor& target, const DeviceMesh& mesh,
                   const CrossEntropyOptions& options) {
  check_one_dimension(mesh, kName);
  if (!logits.defined() || !target.defined()) refuse("the logits or the target are undefined");
  if (is_dtensor(logits) || is_dtensor(target) || is_dtensor(options.weight)) {
    refuse("a DTensor was given; torch::nn::functional::cross_entropy takes it as it is");
  }
  if (detail::has_tangent(logits) || detail::has_tangent(options.weight)) {
    refuse(
        "the logits or the weights have a forward-mode derivative, which this kernel has no formula for; bring the "
        "classes "
        "together by gather_from_region and call torch::nn::functional::cross_entropy, or give it a DTensor");
  }
  if (options.weight.defined() && options.weight.requires_grad() && at::GradMode::is_enabled()) {
    refuse("the weights of classes ask for a gradient, which this kernel has no formula for; give it weight.detach()");
  }
  check_device(logits, mesh, kName, "tensor of logits");
  check_device(target, mesh, kName, "target");
  check_device(options.weight, mesh, kName, "weight");
  if (!at::isIntegralType(target.scalar_type(), /*includeBool=*/false)) {
    refuse(fmt::format("a target of {}; a target has class numbers", c10::toString(target.scalar_type())));
  }
  // Logits belong to this rank and may be wrong on it alone.
  if (logits.dim() < 1 || target.sizes() != logits.sizes().slice(0, static_cast<std::size_t>(logits.dim() - 1))) {
    refuse_alone(mesh, kName,
                 fmt::format("logits [{}] and target [{}]; they are [*, classes] and [*]",
                             fmt::join(logits.sizes(), ", "), fmt::join(target.sizes(), ", ")));
  }
  if (!at::isFloatingType(logits.scalar_type())) {
    refuse_alone(mesh, kName,
                 fmt::format("logits of {}; they are of a floating dtype", c10::toString(logits.scalar_type())));
  }
}

// Returns the number of classes and this rank's part. A rank that takes the number from its own may be wrong alone.
Problem problem_of(const at::Tensor& logits, const DeviceMesh& mesh, const CrossEntropyOptions& options) {
  const int64_t here = logits.size(-1);
  Problem p{.mesh = mesh,
            .weight = options.weight,
            .ignore_index = options.ignore_index,
            .reduction = options.reduction,
            .classes = options.classes.value_or(here * mesh.size()),
            .classes_given = options.classes.has_value(),
            .mine = {}};
  p.mine = chunk_range(p.classes, mesh.size(), mesh.local_rank(0));
  if (p.mine.size() != here || p.classes == 0) {
    refuse_alone(mesh, kName,
                 fmt::format("{} of {} classes here, of which this rank has {}; options.classes is their number", here,
                             p.classes, p.mine.size()));
  }
  return p;
}

Problem checked(const at::Tensor& logits, const at::Tensor& target, const DeviceMesh& mesh,
                const CrossEntropyOptions& options) {
  check_tensors(logits, target, mesh, options);
  Problem p = problem_of(logits, mesh, options);
  // If each rank took the number of classes from its own, this may be wrong on this rank alone.
  const auto refuse_count = [&](const std::string& why) {
    refuse_alone(mesh, kName, why + "; uneven classes need options.classes");
  };
  if (options.weight.defined() && (options.weight.dim() != 1 || options.weight.size(0) != p.classes)) {
    const std::string why = fmt::format("weight [{}] for {} classes; it has one number per class",
                                        fmt::join(options.weight.sizes(), ", "), p.classes);
    if (options.classes) refuse(why);
    refuse_count(why);
  }
  const double a = options.label_smoothing;
  if (!(a >= 0 && a <= 1)) refuse(fmt::format("label_smoothing {} is outside [0, 1]", a));
  if (a > 0 && options.smoothing == SmoothingFormula::kMegatron) {
    if (p.classes < 2)
      refuse("smoothing by Megatron's formula gives probability to the other classes, and there is one class");
    p.spread = a * static_cast<double>(p.classes) / static_cast<double>(p.classes - 1);
  } else {
    p.spread = a;
  }
  p.by_kernels = p.spread == 0 && detail::takes_logits(logits);
  if (p.by_kernels) return p;  // they check the target
  const at::Tensor outside =
      target.ne(options.ignore_index).logical_and_(target.lt(0).logical_or_(target.ge(p.classes)));
  if (is_queued(target)) {
    if (target.numel() > 0) {
      check_on_device(outside.logical_not(), "sharded_cross_entropy: a target is out of the classes' bounds");
    }
    return p;
  }
  if (target.numel() > 0 && outside.any().item<bool>()) {
    const std::string why =
        fmt::format("target {} is out of bounds: there are {} classes, and ignore_index is {}",
                    target.masked_select(outside)[0].item<int64_t>(), p.classes, options.ignore_index);
    if (options.classes) refuse_value(mesh, kName, why);
    refuse_count(why);
  }
  return p;
}

}  // namespace

at::Tensor sharded_cross_entropy(const at::Tensor& logits, const at::Tensor& target, const DeviceMesh& mesh,
                                 const CrossEntropyOptions& options) {
  const bool whole = target.defined() && at::isIntegralType(target.scalar_type(), /*includeBool=*/false);
  const at::Tensor classes = whole ? target.to(at::kLong) : target;  // ignore_index may not fit a narrow dtype
  return ShardedCrossEntropy::apply(logits, classes, checked(logits, classes, mesh, options));
}

}  // namespace tessera
