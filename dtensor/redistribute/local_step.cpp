#include "tessera/dtensor/redistribute/local_step.h"

#include <stdexcept>

#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/core/wire.h"

namespace tessera {
namespace {

// Returns the piece that `method` of a reduction, which may be a user's, has made of `value`, in the value's dtype: in
// that dtype pieces are copied and sent.
at::Tensor piece_of(const at::Tensor& made, const at::Tensor& value, const Reduction& reduction, const char* method) {
  if (made.sizes() == value.sizes()) {
    return made.scalar_type() == value.scalar_type() ? made : made.to(value.scalar_type());
  }
  throw std::invalid_argument(fmt::format(
      "redistribute: Reduction::{} of P({}) has made a piece [{}] of a value [{}]; return a piece of the value's sizes",
      method, reduction.text(), fmt::join(made.sizes(), ", "), fmt::join(value.sizes(), ", ")));
}

}  // namespace

LocalStep::LocalStep(const StepOnRank& at)
    : slice_(Region::within(at.source(), intersect(at.source(), at.target()))), sizes_(shape_of(at.target())) {
  for (std::size_t i = 0; i < at.mesh_shape.size(); ++i) {
    const Placement& from = at.step.from[i];
    const Placement& to = at.step.to[i];
    if (from == to && from.is_partial() && !from.reduction().slope(1)) stays_pending_ = from.reduction_ptr();
    if (from == to || !to.is_partial()) continue;
    if (from.is_partial()) {  // for both, value = slope * sum of pieces
      scale_ *= from.reduction().slope(at.mesh_shape[i]).value() / to.reduction().slope(at.mesh_shape[i]).value();
      continue;
    }
    (from.is_shard() ? embedded_ : formed_)
        .push_back({.reduction = to.reduction_ptr(), .coordinate = at.coordinate[i], .ranks = at.mesh_shape[i]});
  }
  if (embedded_.empty() && formed_.empty()) stays_pending_ = nullptr;
  if (!embedded_.empty()) inside_ = Region::within(at.target(), intersect(at.source(), at.target()));
}

at::Tensor LocalStep::run(const at::Tensor& piece) const {
  // read() of a box keeps the piece's strides.
  at::Tensor out = slice_.is_box() ? slice_.read(piece) : slice_.read(row_major(piece));
  if (stays_pending_) out = value_of_terms(*stays_pending_, term_of(*stays_pending_, out), 1).to(out.scalar_type());
  if (scale_ != 1) out = out.mul(scale_);
  if (!embedded_.empty()) out = embed(row_major(out));
  for (const Forming& each : formed_) {
    const Reduction& reduction = *each.reduction;
    out = piece_of(reduction.spread(out, each.coordinate, each.ranks), out, reduction, "spread");
  }
  return out;
}

// Returns a piece of the target's sizes: this rank is the only one that holds these elements, and the others are
// neutral.
at::Tensor LocalStep::embed(const at::Tensor& piece) const {
  at::Tensor only = piece;
  for (const Forming& each : embedded_) {
    const Reduction& reduction = *each.reduction;
    only = piece_of(reduction.only_piece(only, each.ranks), only, reduction, "only_piece");
  }
  at::Tensor out = at::full(sizes_, embedded_[0].reduction->neutral(piece.scalar_type()), piece.options());
  inside_->unpack(row_major(only), 0, out);
  return out;
}

}  // namespace tessera
