#include "tessera/dtensor/bucketed_grad.h"

#include <utility>

#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/placement/layout.h"

namespace tessera {
namespace {

// Returns placements that a tensor laid out as either is brought into without communication, unless both are cut: on
// each mesh dimension Partial if one is, else Shard if one is. A cut that two mesh dimensions make together may lack
// one of them then; in that case the cuts are those of `a` alone, or of neither.
Placements of_both(const Placements& a, const Placements& b, const Spec& spec) {
  const auto together = [&](Placements cuts, const auto& takes) {
    for (std::size_t i = 0; i < cuts.size(); ++i) {
      if (takes(cuts[i], a[i])) cuts[i] = a[i];
      if (takes(cuts[i], b[i])) cuts[i] = b[i];
    }
    return cuts;
  };
  const auto takes_all = [](const Placement& now, const Placement& next) {
    return now.is_replicate() || (next.is_partial() && !now.is_partial());
  };
  const auto takes_terms = [](const Placement& now, const Placement& next) {
    return next.is_partial() && !now.is_partial();
  };
  const Placements none(a.size(), Replicate());
  const auto fits = [&](const Placements& p) { return is_layout(p, spec.mesh.mesh(), spec.sizes); };
  if (const Placements both = together(none, takes_all); fits(both)) return both;
  const Placements of_a = together(a, takes_terms);
  return fits(of_a) ? of_a : together(none, takes_terms);
}

}  // namespace

at::Tensor BucketedGrad::become_term(const at::Tensor& gradient) const {
  const at::Tensor tensor = parameter();
  if (!tensor.defined() || !tensor.grad().defined()) return gradient;
  at::Tensor& grad = tensor.mutable_grad();
  const Placements both = of_both(placements_of(grad), placements_of(gradient), spec_of(gradient));
  if (placements_of(grad) != both) grad = redistribute(grad, both);
  return placements_of(gradient) == both ? gradient : redistribute(gradient, both);
}

at::Tensor BucketedGrad::take() const {
  const at::Tensor tensor = parameter();
  if (!tensor.defined() || !is_dtensor(tensor.grad())) return {};
  return std::exchange(tensor.mutable_grad(), at::Tensor());
}

at::Tensor BucketedGrad::take_unless(const Placements& layout) const {
  const at::Tensor tensor = parameter();
  if (!tensor.defined() || !is_dtensor(tensor.grad()) || placements_of(tensor.grad()) == layout) return {};
  return take();
}

void BucketedGrad::add(const at::Tensor& value) const {
  const at::Tensor tensor = parameter();
  if (!tensor.defined()) return;
  at::Tensor& grad = tensor.mutable_grad();
  if (grad.defined()) {
    grad.add_(value);
  } else {
    grad = value;
  }
}

}  // namespace tessera
