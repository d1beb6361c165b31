#include "tessera/ops/kernels/sharded_cross_entropy.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/mappings.h"
#include "tessera/dtensor/saved.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/device_checks.h"
#include "tessera/mesh/mesh_checks.h"
#include "tessera/ops/kernels/logit_kernels.h"
#include "tessera/placement/partition.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

// The logits are worked on in parts. A part is small enough that its buffers do not matter beside the logits, and large
// enough that the calls' overhead does not matter.
constexpr int64_t kPartsOfLogits = 128;
constexpr int64_t kLeastPartBytes = 128 << 10;
constexpr int64_t kMostPartBytes = 4 << 20;

at::ScalarType sum_type(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

// [*, k] -> [n, k]
at::Tensor by_rows(const at::Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : t.flatten(0, -2); }

// Holds one call, with its rows and classes counted.
//
// With x the logits, S = sum over classes of exp(x - m), m a row's greatest logit, w the classes' weights, t the
// target, and a the probability that smoothing spreads evenly over all classes:
//   loss = (1 - a) w_t (log S + m - x_t) + a / K * sum over k of w_k (log S + m - x_k)
struct Problem {
  std::optional<DeviceMesh> mesh;
  CrossEntropyOptions options;
  int64_t classes = 0;  // K
  Interval mine;        // this rank's classes
  double spread = 0;    // a

  at::Tensor weight_here(const at::Tensor& like) const {
    return options.weight.defined() ? options.weight.slice(0, mine.begin, mine.end).to(sum_type(like.scalar_type()))
                                    : at::Tensor();
  }
};

// Holds what the computation needs of a row besides its logits.
struct Rows {
  at::Tensor target;  // its class, 0 where ignored
  at::Tensor weight;  // its weight: w_t, or 0 where ignored
  at::Tensor kept;    // 1, or 0 where ignored
  at::Tensor column;  // the index of the class in this rank's columns, 0 if it is on another rank
  at::Tensor here;    // whether this rank has the class
};

Rows rows_of(const at::Tensor& target, const Problem& p, at::ScalarType type) {
  const at::Tensor flat = target.reshape({-1});
  const at::Tensor ignored = flat.eq(p.options.ignore_index);
  Rows rows;
  rows.kept = ignored.logical_not().to(type);
  rows.target = flat.masked_fill(ignored, 0);
  rows.weight =
      p.options.weight.defined() ? p.options.weight.to(type).index_select(0, rows.target) * rows.kept : rows.kept;
  rows.here = rows.target.ge(p.mine.begin).logical_and_(rows.target.lt(p.mine.end));
  rows.column = (rows.target - p.mine.begin).masked_fill_(rows.here.logical_not(), 0);
  return rows;
}

// Calls `body` with the first row and the row after the last of each part of `logits` [n, k].
template <class Body>
void by_parts(const at::Tensor& logits, const Body& body) {
  const int64_t n = logits.size(0);
  const int64_t row =
      std::max<int64_t>(1, logits.size(1)) * static_cast<int64_t>(elementSize(sum_type(logits.scalar_type())));
  const int64_t step =
      std::max<int64_t>(1, std::clamp(n * row / kPartsOfLogits, kLeastPartBytes, kMostPartBytes) / row);
  for (int64_t begin = 0; begin < n; begin += step) body(begin, std::min(n, begin + step));
}

constexpr const char* kName = "sharded_cross_entropy";

// Where each rank took the number of classes from its own: checks that all ranks together have that many, which is not
// so if classes are uneven.
void check_count(const at::Tensor& counted, const Problem& p) {
  constexpr int64_t kExact = 1 << 24;  // up to which sums of float32 are exact
  if (p.options.classes || p.mesh->size() == 1 || p.classes > kExact) return;
  if (is_queued(counted)) {
    return check_on_device(
        counted == p.classes,
        "sharded_cross_entropy: the ranks have uneven numbers of classes, which need options.classes");
  }
  const auto all = static_cast<int64_t>(counted.item<double>());
  if (all == p.classes) return;
  refuse_alone(*p.mesh, kName,
               fmt::format("{} classes here, of {} on all {} ranks; uneven ones need options.classes", p.mine.size(),
                           all, p.mesh->size()));
}

// Holds sums over all classes of each row, [n] each.
struct Sums {
  at::Tensor greatest;  // m
  at::Tensor exps;      // S
  at::Tensor loss;
};

// Sets `terms` [2 or 3, n] to this rank's terms of S, of x_t - m and, with smoothing, of the sum of w_k (x_k - m).
void set_terms_in_parts(const at::Tensor& logits, const at::Tensor& greatest, const Rows& rows, const Problem& p,
                        const at::Tensor& terms) {
  const at::Tensor weight = p.weight_here(logits);
  by_parts(logits, [&](int64_t begin, int64_t end) {
    if (logits.size(1) == 0) return;
    const at::Tensor x = logits.slice(0, begin, end).to(greatest.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    x.sub_(greatest.slice(0, begin, end).unsqueeze(1));
    const at::Tensor picked = x.gather(1, rows.column.slice(0, begin, end).unsqueeze(1)).squeeze(1);
    terms[1].slice(0, begin, end).copy_(picked.masked_fill(rows.here.slice(0, begin, end).logical_not(), 0));
    if (p.spread > 0) terms[2].slice(0, begin, end).copy_((weight.defined() ? x * weight : x).sum(1));
    terms[0].slice(0, begin, end).copy_(x.exp_().sum(1));
  });
}

Sums sums_of(const at::Tensor& logits, const Rows& rows, const Problem& p) {
  const at::ScalarType type = sum_type(logits.scalar_type());
  const auto options = logits.options().dtype(type);
  const int64_t n = logits.size(0);
  const std::optional<detail::RowSums> at_once =
      p.spread > 0 ? std::nullopt : detail::row_sums_on_gpu(logits, rows.column);
  const at::Tensor most = at_once              ? at_once->greatest
                          : logits.size(1) > 0 ? logits.amax(1).to(type)
                                               : at::full({n}, -std::numeric_limits<double>::infinity(), options);
  Sums out;
  out.greatest = all_reduce(most, *p.mesh, 0, ReduceOp::kMax);
  const int64_t kinds = p.spread > 0 ? 3 : 2;
  const at::Tensor flat = at::zeros({kinds * n + 1}, options);
  const at::Tensor terms = flat.narrow(0, 0, kinds * n).view({kinds, n});
  flat[kinds * n].fill_(logits.size(1));
  if (at_once) {
    detail::set_terms(*at_once, out.greatest, rows.here, terms[0], terms[1]);
  } else {
    set_terms_in_parts(logits, out.greatest, rows, p, terms);
  }
  const at::Tensor reduced = all_reduce(flat, *p.mesh, 0, ReduceOp::kSum);
  check_count(reduced[kinds * n], p);
  const at::Tensor sums = reduced.narrow(0, 0, kinds * n).view({kinds, n});
  out.exps = sums[0];
  const at::Tensor log_sum = sums[0].log();
  out.loss = (log_sum - sums[1]) * rows.weight * (1 - p.spread);
  if (p.spread > 0) {
    const at::Tensor total =
        p.options.weight.defined() ? p.options.weight.to(type).sum() : at::full({}, p.classes, options);
    out.loss = out.loss + (log_sum * total - sums[2]) * rows.kept * (p.spread / static_cast<double>(p.classes));
  }
  // An ignored row contributes nothing, whatever its logits are.
  out.loss = out.loss.masked_fill(rows.kept.eq(0), 0);
  return out;
}

// Returns the gradient of each row's loss: that of the result, divided by the total weight for a mean.
at::Tensor row_gradients(const at::Tensor& g, const Rows& rows, const Problem& p) {
  const at::Tensor flat = g.to(rows.kept.scalar_type()).reshape({-1});
  const at::Tensor each = p.options.reduction == at::Reduction::Mean ? flat / rows.weight.sum() : flat;
  return each.expand_as(rows.kept).masked_fill(rows.kept.eq(0), 0);  // a mean of no rows divides by 0
}

// Holds the factors of a row's gradient, which is  g (A p_k - [k = t] B - C w_k)  in column k, where p is the softmax.
struct Factors {
  at::Tensor softmax, target;  // A, B: [n, 1]
  double spread = 0;           // C
};

Factors factors_of(const Rows& rows, const Problem& p) {
  const double c = p.spread / static_cast<double>(p.classes);
  const at::Tensor on_target = rows.weight * (1 - p.spread);
  at::Tensor on_all = on_target;
  if (p.spread > 0) {
    const at::Tensor total = p.options.weight.defined() ? p.options.weight.to(rows.kept.scalar_type()).sum()
                                                        : at::full({}, p.classes, rows.kept.options());
    on_all = on_target + total * c;
  }
  return {.softmax = on_all.unsqueeze(1), .target = on_target.unsqueeze(1), .spread = c};
}

// Returns what is added at each row's target if it is in this rank's columns, and 0 if it is not.
at::Tensor at_target(const Factors& factors, const Rows& rows) {
  return factors.target.neg().masked_fill_(rows.here.logical_not().unsqueeze(1), 0);
}

// Returns the gradient in a differentiable form.
at::Tensor gradient_of(const at::Tensor& softmax, const at::Tensor& g, const Rows& rows, const Factors& factors,
                       const at::Tensor& weight) {
  at::Tensor out = softmax * factors.softmax;
  if (out.size(1) > 0) out = out.scatter_add(1, rows.column.unsqueeze(1), at_target(factors, rows));
  if (factors.spread > 0) out = weight.defined() ? out - weight * factors.spread : out - factors.spread;
  return out * g.unsqueeze(1);
}

struct ShardedCrossEntropy : torch::autograd::Function<ShardedCrossEntropy> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& target,
                            const Problem& p) {
    detail::saved<Problem>(ctx, "problem") = p;
    const at::Tensor flat = by_rows(logits);
    const Rows rows = rows_of(target, p, sum_type(logits.scalar_type()));
    const Sums sums = sums_of(flat, rows, p);
    // The classes' weights are saved too, so that autograd detects a later write.
    if (logits.requires_grad()) ctx->save_for_backward({logits, target, sums.greatest, sums.exps, p.options.weight});
    detail::saved<Problem>(ctx, "problem").options.weight.reset();
    switch (p.options.reduction) {
      case at::Reduction::Mean: return sums.loss.sum() / rows.weight.sum();
      case at::Reduction::Sum: return sums.loss.sum();
      default: return sums.loss.view(target.sizes());
    }
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    Problem p = detail::saved<Problem>(ctx, "problem");
    const tensor_list saved = ctx->get_saved_variables();
    p.options.weight = saved[4];
    const at::Tensor &logits = saved[0], &target = saved[1];
    const at::Tensor x = by_rows(logits);
    const Rows rows = rows_of(target, p, sum_type(logits.scalar_type()));
    const at::Tensor gradient = c10::GradMode::is_enabled() ? differentiable(x, grads[0], rows, p)
                                                            : in_parts(x, grads[0], rows, p, saved[2], saved[3]);
    return {gradient.view(logits.sizes()), at::Tensor(), at::Tensor()};
  }

 private:
  static at::Tensor in_parts(const at::Tensor& x, const at::Tensor& grad, const Rows& rows, const Problem& p,
                             const at::Tensor& greatest, const at::Tensor& exps) {
    const at::Tensor g = row_gradients(grad, rows, p), weight = p.weight_here(x);
    const Factors factors = factors_of(rows, p);
    const at::Tensor out = at::empty_like(x, at::MemoryFormat::Contiguous);
    // For each row: the factor of its exponentials, what is added at its target, and what is added to every class.
    const at::Tensor on_exps = factors.softmax * (g / exps).unsqueeze(1);
    const at::Tensor on_target = at_target(factors, rows) * g.unsqueeze(1);
    const at::Tensor on_all = g.unsqueeze(1) * -factors.spread;
    if (factors.spread == 0 &&
        detail::gradient_on_gpu(x, {rows.column, greatest, on_exps, on_target, rows.kept}, out)) {
      return out;
    }
    const bool in_place = x.scalar_type() == g.scalar_type();
    by_parts(x, [&](int64_t begin, int64_t end) {
      const auto part = [&](const at::Tensor& t) { return t.slice(0, begin, end); };
      const at::Tensor here = in_place ? part(out) : at::empty_like(part(x), g.options());
      here.copy_(part(x)).sub_(part(greatest).unsqueeze(1)).exp_().mul_(part(on_exps));
      if (here.size(1) > 0) here.scatter_add_(1, part(rows.column).unsqueeze(1), part(on_target));
      if (factors.spread > 0 && weight.defined()) here.addr_(part(on_all).squeeze(1), weight);
      if (factors.spread > 0 && !weight.defined()) here.add_(part(on_all));
      if (!in_place) part(out).copy_(here);
    });
    return out.masked_fill_(rows.kept.eq(0).unsqueeze(1), 0);
  }

  // Every rank's exponentials are in every rank's sum and so in its softmax, so gradients of the sum are terms of one.
  static at::Tensor differentiable(const at::Tensor& x, const at::Tensor& grad, const Rows& rows, const Problem& p) {
    const at::ScalarType type = sum_type(x.scalar_type());
    const at::Tensor most = x.size(1) > 0
                                ? x.detach().amax(1).to(type)
                                : at::full({x.size(0)}, -std::numeric_limits<double>::infinity(), rows.kept.options());
    const at::Tensor e = (x.to(type) - all_reduce(most, *p.mesh, 0, ReduceOp::kMax).unsqueeze(1)).exp();
    const at::Tensor sum = copy_to_region(reduce_from_region(e.sum(1), *p.mesh), *p.mesh);
    const at::Tensor g = row_gradients(copy_to_region(grad, *p.mesh), rows, p);
    const at::Tensor out = gradient_of(e / sum.unsqueeze(1), g, rows, factors_of(rows, p), p.weight_here(x));
    return out.masked_fill(rows.kept.eq(0).unsqueeze(1), 0).to(x.scalar_type());
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
  Problem p{.mesh = mesh, .options = options, .classes = options.classes.value_or(here * mesh.size()), .mine = {}};
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
    if (options.classes) refuse(why);
    refuse_alone(mesh, kName, why + "; uneven classes need options.classes");
  };
  if (options.weight.defined() && (options.weight.dim() != 1 || options.weight.size(0) != p.classes)) {
    refuse_count(fmt::format("weight [{}] for {} classes; it has one number per class",
                             fmt::join(options.weight.sizes(), ", "), p.classes));
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
  const at::Tensor outside =
      target.ne(options.ignore_index).logical_and_(target.lt(0).logical_or_(target.ge(p.classes)));
  if (is_queued(target)) {
    if (target.numel() > 0) {
      check_on_device(outside.logical_not(), "sharded_cross_entropy: a target is out of the classes' bounds");
    }
    return p;
  }
  if (target.numel() > 0 && outside.any().item<bool>()) {
    refuse_count(fmt::format("target {} is out of bounds: there are {} classes, and ignore_index is {}",
                             target.masked_select(outside)[0].item<int64_t>(), p.classes, options.ignore_index));
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
