// Computes the cross entropy of DTensors whose classes are cut over one mesh dimension.

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cross_entropy_loss_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/movedim.h>
#include <fmt/format.h>
#include <torch/library.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/ops/kernels/sharded_cross_entropy.h"

namespace tessera {
namespace {

using Optional = std::optional<at::Tensor>;

struct Call {
  const at::Tensor& logits;  // [n, classes, *], or [classes]
  const at::Tensor& target;  // [n, *], or []
  const Optional& weight;    // [classes]
  int64_t ignore_index;
  double label_smoothing;

  bool weighted() const { return weight && weight->defined(); }
  int64_t class_dim() const { return logits.dim() == 1 ? 0 : 1; }
};

// Says whether `t` is a DTensor on the same mesh, or a plain tensor where those count as replicated.
bool may_join(const at::Tensor& t, const at::Tensor& logits) {
  return is_dtensor(t) ? mesh_of(t) == mesh_of(logits) : ImplicitReplication::enabled();
}

// Says whether the target has dtypes that LibTorch takes, and the weights one that does beside these logits, or would
// under autocast.
bool takes_types(const Call& call) {
  const at::ScalarType target = call.target.scalar_type();
  if (target != at::kLong && !(target == at::kByte && call.logits.dim() <= 2)) return false;
  if (!call.weighted()) return true;
  const at::ScalarType type = call.logits.scalar_type(), weight = call.weight->scalar_type();
  return weight == type || (weight == at::kFloat && c10::isReducedFloatingType(type));
}

// Returns the mesh dimension that cuts the classes, if the sharded kernel takes the call: this mesh dimension alone
// cuts them, by torch.chunk's rule, and the others leave each rank whole rows. Calls that LibTorch would refuse are
// left to it.
std::optional<int64_t> classes_dim(const Call& call) {
  if (!is_dtensor(call.logits) || call.logits.dim() < 1 || !at::isFloatingType(call.logits.scalar_type())) return {};
  if (!mesh_of(call.logits).is_member()) return {};
  // The kernel has no formula for forward mode; the operators that LibTorch makes the loss of have.
  if (detail::has_tangent(call.logits) || (call.weighted() && detail::has_tangent(*call.weight))) return {};
  // Nor has it one for the gradient of the weights.
  if (call.weighted() && call.weight->requires_grad() && at::GradMode::is_enabled()) return {};
  if (!takes_types(call) || !may_join(call.target, call.logits)) return {};
  if (call.weighted() && !may_join(*call.weight, call.logits)) return {};
  if (!(call.label_smoothing >= 0 && call.label_smoothing <= 1)) return {};
  std::vector<int64_t> sizes = call.logits.sizes().vec();
  sizes.erase(sizes.begin() + call.class_dim());
  const int64_t classes = call.logits.size(call.class_dim());
  if (call.target.sizes() != at::IntArrayRef(sizes) || classes == 0) return {};
  if (call.weighted() && call.weight->sizes() != at::IntArrayRef({classes})) return {};
  std::optional<int64_t> found;
  const Placements& placements = placements_of(call.logits);
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (placements[i].is_partial()) return {};
    if (!placements[i].is_shard() || placements[i].tensor_dim() != call.class_dim()) continue;
    if (found || !placements[i].is_chunks()) return {};
    found = static_cast<int64_t>(i);
  }
  return found;
}

// Returns the layout of the target and the losses: that of the logits' rows, replicated on the classes' mesh dimension.
Placements rows_placements(const Call& call, int64_t classes_mesh_dim) {
  Placements out = placements_of(call.logits);
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (static_cast<int64_t>(i) == classes_mesh_dim) {
      out[i] = Replicate();
    } else if (out[i].is_shard() && out[i].tensor_dim() > call.class_dim()) {
      out[i] = out[i].on(out[i].tensor_dim() - 1);
    }
  }
  return out;
}

// Returns a target, or the classes' weights, as a plain tensor in the layout that the kernel needs.
at::Tensor piece_as(const at::Tensor& t, const DeviceMesh& mesh, const Placements& wanted) {
  if (is_dtensor(t)) return to_local(redistribute(t, wanted));
  const Placements whole(wanted.size(), Replicate());
  return to_local(redistribute(from_local(t, mesh, whole), wanted));
}

// Holds the loss of each row and, where it is asked for, the row's weight in the mean.
struct Losses {
  at::Tensor loss;
  at::Tensor count;
};

constexpr const char* kName = "cross_entropy_loss";

// Reports the kernel's own collectives as implicit communication (modes.h), since the caller did not ask for them.
void announce(const Call& call, int64_t mesh_dim) {
  if (mesh_of(call.logits).size(mesh_dim) == 1) return;
  detail::implicit_communication(kName, [&] {
    return fmt::format(
        "; the classes of {} are cut, which takes two all_reduces of one or two numbers per row; "
        "parallel_cross_entropy "
        "is explicit",
        to_string(call.logits));
  });
}

// Where other mesh dimensions cut the rows, a target may be wrong on some ranks alone; the kernel then runs under
// World::guard.
at::Tensor guarded(const Call& call, int64_t mesh_dim, const std::function<at::Tensor()>& kernel) {
  const Placements& placements = placements_of(call.logits);
  World& world = mesh_of(call.logits).world();
  const World::Scope scope(world, kName);
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (static_cast<int64_t>(i) == mesh_dim || !placements[i].is_shard()) continue;
    at::Tensor out;
    world.guard(kName, [&] { out = kernel(); });
    return out;
  }
  return kernel();
}

Losses losses_of(const Call& call, int64_t mesh_dim, bool count) {
  const DeviceMesh mesh = mesh_of(call.logits);
  const Placements rows = rows_placements(call, mesh_dim);
  const at::Tensor target = piece_as(call.target, mesh, rows).to(at::kLong);
  const Placements everywhere(rows.size(), Replicate());
  const at::Tensor weight = call.weighted() ? piece_as(*call.weight, mesh, everywhere) : at::Tensor();
  // Each rank along the classes' mesh dimension has the whole gradient of its own columns.
  const at::Tensor piece = to_local(call.logits);
  const at::Tensor last = piece.dim() > 2 ? at::movedim(piece, 1, -1) : piece;
  const at::Tensor loss = guarded(call, mesh_dim, [&] {
    return sharded_cross_entropy(last, target, mesh.merged({mesh_dim}),
                                 {.weight = weight,
                                  .ignore_index = call.ignore_index,
                                  .reduction = at::Reduction::None,
                                  .label_smoothing = call.label_smoothing,
                                  .classes = call.logits.size(call.class_dim())});
  });
  const auto as_rows = [&](const at::Tensor& t) {
    return from_local(t, mesh, rows, {.shape = call.target.sizes().vec()});
  };
  Losses out{.loss = as_rows(loss), .count = {}};
  if (!count) return out;
  const at::Tensor ignored = target.eq(call.ignore_index);
  const at::Tensor kept = ignored.logical_not().to(loss.scalar_type());
  out.count = as_rows(weight.defined() ? weight.to(loss.scalar_type())
                                                 .index_select(0, target.masked_fill(ignored, 0).reshape({-1}))
                                                 .view(target.sizes()) *
                                             kept
                                       : kept);
  return out;
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target, const Optional& weight, int64_t reduction,
                         c10::SymInt ignore_index, double label_smoothing) {
  const Call call{.logits = logits,
                  .target = target,
                  .weight = weight,
                  .ignore_index = ignore_index.expect_int(),
                  .label_smoothing = label_smoothing};
  const std::optional<int64_t> mesh_dim = classes_dim(call);
  if (!mesh_dim) {
    return at::compositeimplicitautograd::cross_entropy_loss_symint(logits, target, weight, reduction,
                                                                    std::move(ignore_index), label_smoothing);
  }
  announce(call, *mesh_dim);
  const Losses losses = losses_of(call, *mesh_dim, reduction == at::Reduction::Mean);
  // LibTorch composes this of operators that return float32 under autocast.
  const bool casts = at::autocast::is_autocast_enabled(logits.device().type());
  const at::ScalarType dtype = casts ? losses.loss.scalar_type() : logits.scalar_type();
  switch (reduction) {
    case at::Reduction::None: return losses.loss.to(dtype);
    case at::Reduction::Sum: return losses.loss.sum().to(dtype);
    default: break;
  }
  // The sum of the weights is reduced here, so that backward has it.
  const Placements everywhere(placements_of(losses.count).size(), Replicate());
  return (losses.loss.sum() / redistribute(losses.count.sum(), everywhere)).to(dtype);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) { m.impl("cross_entropy_loss", cross_entropy); }
TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) { m.impl("cross_entropy_loss", cross_entropy); }

}  // namespace
}  // namespace tessera
