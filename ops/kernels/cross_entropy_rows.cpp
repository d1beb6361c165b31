#include "tessera/ops/kernels/cross_entropy_rows.h"

#include <algorithm>
#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "tessera/dtensor/mappings.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/device_checks.h"
#include "tessera/mesh/mesh_checks.h"

namespace tessera::cross_entropy {
namespace {

// The logits are worked on in parts. A part is small enough that its buffers do not matter beside the logits, and on
// the CPU stay in the cache, and large enough that the calls' overhead does not matter.
constexpr int64_t kPartsOfLogits = 128;
constexpr int64_t kLeastPartBytes = 128 << 10;
constexpr int64_t kMostPartBytesOnCpu = 4 << 20;

// Calls `body` with the first row and the row after the last of each part of `logits` [n, k].
template <class Body>
void by_parts(const at::Tensor& logits, const Body& body) {
  const int64_t n = logits.size(0);
  const int64_t row =
      std::max<int64_t>(1, logits.size(1)) * static_cast<int64_t>(elementSize(sum_type(logits.scalar_type())));
  int64_t bytes = std::max(n * row / kPartsOfLogits, kLeastPartBytes);
  if (logits.is_cpu()) bytes = std::min(bytes, kMostPartBytesOnCpu);
  const int64_t step = std::max<int64_t>(1, bytes / row);
  for (int64_t begin = 0; begin < n; begin += step) body(begin, std::min(n, begin + step));
}

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

// Returns the greatest logit of each row of this rank, -inf where it has none.
at::Tensor greatest_here(const at::Tensor& logits) {
  const at::ScalarType type = sum_type(logits.scalar_type());
  if (logits.size(1) > 0) return logits.amax(1).to(type);
  return at::full({logits.size(0)}, -std::numeric_limits<double>::infinity(), logits.options().dtype(type));
}

// Returns the gradient of each row's loss: that of the result, divided by the total weight for a mean.
at::Tensor row_gradients(const at::Tensor& g, const Rows& rows, const Problem& p) {
  const at::Tensor flat = g.to(rows.kept.scalar_type()).reshape({-1});
  const at::Tensor each = p.reduction == at::Reduction::Mean ? flat / rows.weight.sum() : flat;
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
    const at::Tensor total =
        p.weight.defined() ? p.weight.to(rows.kept.scalar_type()).sum() : at::full({}, p.classes, rows.kept.options());
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

}  // namespace

Rows rows_of(const at::Tensor& target, const Problem& p, at::ScalarType type) {
  const at::Tensor flat = target.reshape({-1});
  const at::Tensor ignored = flat.eq(p.ignore_index);
  Rows rows;
  rows.kept = ignored.logical_not().to(type);
  rows.target = flat.masked_fill(ignored, 0);
  rows.weight = p.weight.defined() ? p.weight.to(type).index_select(0, rows.target) * rows.kept : rows.kept;
  rows.here = rows.target.ge(p.mine.begin).logical_and_(rows.target.lt(p.mine.end));
  rows.column = (rows.target - p.mine.begin).masked_fill_(rows.here.logical_not(), 0);
  return rows;
}

void check_count(const at::Tensor& counted, const Problem& p) {
  constexpr int64_t kExact = 1 << 24;  // up to which sums of float32 are exact
  if (p.classes_given || p.mesh->size() == 1 || p.classes > kExact) return;
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

Sums sums_of(const at::Tensor& logits, const Rows& rows, const Problem& p) {
  const at::ScalarType type = sum_type(logits.scalar_type());
  const auto options = logits.options().dtype(type);
  const int64_t n = logits.size(0);
  Sums out;
  out.greatest = all_reduce(greatest_here(logits), *p.mesh, 0, ReduceOp::kMax);
  const int64_t kinds = p.spread > 0 ? 3 : 2;
  const at::Tensor flat = at::zeros({kinds * n + 1}, options);
  const at::Tensor terms = flat.narrow(0, 0, kinds * n).view({kinds, n});
  flat[kinds * n].fill_(logits.size(1));
  set_terms_in_parts(logits, out.greatest, rows, p, terms);
  const at::Tensor reduced = all_reduce(flat, *p.mesh, 0, ReduceOp::kSum);
  check_count(reduced[kinds * n], p);
  const at::Tensor sums = reduced.narrow(0, 0, kinds * n).view({kinds, n});
  out.exps = sums[0];
  const at::Tensor log_sum = sums[0].log();
  out.loss = (log_sum - sums[1]) * rows.weight * (1 - p.spread);
  if (p.spread > 0) {
    const at::Tensor total = p.weight.defined() ? p.weight.to(type).sum() : at::full({}, p.classes, options);
    out.loss = out.loss + (log_sum * total - sums[2]) * rows.kept * (p.spread / static_cast<double>(p.classes));
  }
  // An ignored row contributes nothing, whatever its logits are.
  out.loss = out.loss.masked_fill(rows.kept.eq(0), 0);
  return out;
}

at::Tensor gradient_in_parts(const at::Tensor& x, const at::Tensor& grad, const Rows& rows, const Problem& p,
                             const at::Tensor& greatest, const at::Tensor& exps) {
  const at::Tensor g = row_gradients(grad, rows, p), weight = p.weight_here(x);
  const Factors factors = factors_of(rows, p);
  const at::Tensor out = at::empty_like(x, at::MemoryFormat::Contiguous);
  // For each row: the factor of its exponentials, what is added at its target, and what is added to every class.
  const at::Tensor on_exps = factors.softmax * (g / exps).unsqueeze(1);
  const at::Tensor on_target = at_target(factors, rows) * g.unsqueeze(1);
  const at::Tensor on_all = g.unsqueeze(1) * -factors.spread;
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
at::Tensor differentiable_gradient(const at::Tensor& x, const at::Tensor& grad, const Rows& rows, const Problem& p) {
  const at::ScalarType type = sum_type(x.scalar_type());
  const at::Tensor most = all_reduce(greatest_here(x.detach()), *p.mesh, 0, ReduceOp::kMax);
  const at::Tensor e = (x.to(type) - most.unsqueeze(1)).exp();
  const at::Tensor sum = copy_to_region(reduce_from_region(e.sum(1), *p.mesh), *p.mesh);
  const at::Tensor g = row_gradients(copy_to_region(grad, *p.mesh), rows, p);
  const at::Tensor out = gradient_of(e / sum.unsqueeze(1), g, rows, factors_of(rows, p), p.weight_here(x));
  return out.masked_fill(rows.kept.eq(0).unsqueeze(1), 0).to(x.scalar_type());
}

}  // namespace tessera::cross_entropy
