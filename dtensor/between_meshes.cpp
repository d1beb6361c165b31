// Implements redistribute_to, which redistributes from one mesh to another.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/hash.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient.h"
#include "tessera/dtensor/redistribute/recent_cache.h"
#include "tessera/dtensor/redistribute/region.h"
#include "tessera/dtensor/redistribute/route.h"
#include "tessera/dtensor/redistribute/route_execution.h"
#include "tessera/dtensor/redistribute/transfer.h"
#include "tessera/dtensor/redistribute/transfer_batch.h"
#include "tessera/dtensor/saved.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/mesh/check_state.h"
#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/core/wire.h"
#include "tessera/mesh/failing.h"
#include "tessera/placement/plan.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

bool pending(const Placements& placements) {
  return std::ranges::any_of(placements, [](const Placement& p) { return p.is_partial(); });
}

// Returns the layout without pending reductions that is estimated to be reached soonest: all of them become the same
// Shard, or all become Replicate.
Placements soonest_value(const Spec& spec) {
  if (!pending(spec.placements)) return spec.placements;
  Placements best = without_partial(spec.placements);
  double least = route_between(spec, best)->plan().microseconds();
  for (int64_t d = 0; d < spec.ndim(); ++d) {
    Placements next = spec.placements;
    for (Placement& p : next) {
      if (p.is_partial()) p = Shard(d);
    }
    next = normalize(next, spec.mesh.mesh(), spec.ndim(), "redistribute_to");
    if (!is_layout(next, spec.mesh.mesh(), spec.sizes)) continue;
    const double time = route_between(spec, next)->plan().microseconds();
    if (time < least) std::tie(least, best) = std::pair(time, next);
  }
  return best;
}

// Returns a 1-D mesh of the ranks of both meshes.
DeviceMesh joined(const DeviceMesh& a, const DeviceMesh& b) {
  std::vector<int64_t> ranks = a.mesh().ranks();
  ranks.insert(ranks.end(), b.mesh().ranks().begin(), b.mesh().ranks().end());
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  const auto size = static_cast<int64_t>(ranks.size());
  return {a.world_ptr(), a.device_type(), Mesh({size}, {"both_meshes"}, std::move(ranks))};
}

at::Tensor exchanged(const at::Tensor& piece, const Spec& from, const Spec& to);

// Moves a 0-d tensor, of which a rank holds one element or none, as a tensor of one dimension.
at::Tensor exchanged_scalar(const at::Tensor& piece, const Spec& from, const Spec& to) {
  const std::vector<int64_t> row = {1};
  const at::Tensor out = exchanged(piece.view({-1}), *intern_spec(from.mesh, from.placements, row, from.dtype),
                                   *intern_spec(to.mesh, to.placements, row, to.dtype));
  return to.mesh.is_member() ? out.view(at::IntArrayRef()) : out;
}

// Holds what this rank sends and receives where a tensor goes from one mesh to another.
struct Crossing {
  bool in_place = false;             // every rank has its new elements, so nothing is sent
  std::optional<Region> kept;        // the part of its old piece that is its new one, where that has elements
  std::optional<Transfer> transfer;  // where something is sent, on a rank of either mesh
};

// Is what a Crossing is found by. It does not keep the meshes alive.
struct CrossingKey {
  CrossingKey(const Spec& from, const Spec& to)
      : from_mesh(from.mesh.id()),
        to_mesh(to.mesh.id()),
        sizes(from.sizes),
        before(from.placements),
        after(to.placements) {}

  friend bool operator==(const CrossingKey&, const CrossingKey&) = default;
  std::size_t hash() const {
    std::size_t seed = c10::hash_combine(from_mesh, to_mesh);
    for (const int64_t size : sizes) seed = c10::hash_combine(seed, static_cast<std::size_t>(size));
    for (const Placement& each : before) seed = c10::hash_combine(seed, each.hash());
    for (const Placement& each : after) seed = c10::hash_combine(seed, each.hash());
    return seed;
  }

  uint64_t from_mesh, to_mesh;
  std::vector<int64_t> sizes;
  Placements before, after;
};

Crossing make_crossing(const Spec& from, const Spec& to) {
  Crossing out;
  const Mesh& before = from.mesh.mesh();
  const Mesh& after = to.mesh.mesh();
  out.in_place = is_in_place(from.sizes, before, from.placements, after, to.placements);
  if (out.in_place) {
    if (to.local_numel() > 0) out.kept = Region::within(from.tile, to.tile);
    return out;
  }
  const DeviceMesh both = joined(from.mesh, to.mesh);
  if (both.is_member()) {
    out.transfer.emplace(exchange_between(from.sizes, before, from.placements, after, to.placements,
                                          both.mesh().ranks(), both.world().rank()),
                         static_cast<std::size_t>(both.local_rank(0)));
  }
  return out;
}

// Returns the crossing, from a cache or newly made: with hundreds of ranks it takes milliseconds to make.
std::shared_ptr<const Crossing> crossing_between(const Spec& from, const Spec& to) {
  static auto* const cache = new RecentCache<CrossingKey, Crossing>(256);  // tensors may outlive static destruction
  CrossingKey key(from, to);
  const std::size_t hash = key.hash();
  if (auto found = cache->find(hash, [&](const CrossingKey& kept, const Crossing&) { return kept == key; }))
    return found;
  auto made = std::make_shared<const Crossing>(make_crossing(from, to));
  cache->insert(hash, std::move(key), made);
  return made;
}

// Moves a piece from a layout on one mesh to a layout on another; neither has a pending reduction.
at::Tensor exchanged(const at::Tensor& piece, const Spec& from, const Spec& to) {
  if (from.sizes.empty()) return exchanged_scalar(piece, from, to);
  const std::shared_ptr<const Crossing> crossing = crossing_between(from, to);
  if (crossing->in_place) {
    if (!crossing->kept) return at::empty(to.local_sizes, piece.options());
    return crossing->kept->read(crossing->kept->is_box() ? piece : row_major(piece));  // of a box it is a view
  }
  if (!crossing->transfer) return piece;
  const Transfer& transfer = *crossing->transfer;
  const DeviceMesh both = joined(from.mesh, to.mesh);
  const auto input = [&] { return transfer.input_of(piece); };
  return TransferBatch(
             both, {{.transfer = &transfer, .tensor = failing(both.world(), "redistribute_to", input), .owned = false}},
             WaitTime::kAtOnce)
      .wait()[0];
}

// Only values without pending reductions are sent between the meshes: a reduction is carried out before, and a Partial
// is formed afterwards.
at::Tensor carry_across(const at::Tensor& local, const Spec& from, const Spec& to) {
  const SpecPtr left = with_placements(from, soonest_value(from));
  const SpecPtr reached = with_placements(to, without_partial(to.placements));
  route_between(*reached, to.placements);  // throws on every rank what only the mesh's would find below
  const at::Tensor value = redistribute_local(local, from, left->placements);
  at::Tensor piece = exchanged(value, *left, *reached);
  if (!to.mesh.is_member()) return at::empty({0}, local.options());
  piece = redistribute_local(piece, *reached, to.placements);
  // A view of a part would keep the whole value in memory.
  return unaliased(piece, value, /*owned=*/!value.is_alias_of(local));
}

// Returns what Checked compares.
std::string text_of_crossing(const Spec& from, const Spec& to) {
  return fmt::format("{} on ranks [{}] -> {} on ranks [{}]", to_string(from.placements),
                     fmt::join(from.mesh.mesh().ranks(), ", "), to_string(to.placements),
                     fmt::join(to.mesh.mesh().ranks(), ", "));
}

struct RedistributeTo : torch::autograd::Function<RedistributeTo> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& dtensor, const SpecPtr& to,
                            const std::optional<Placements>& gradient) {
    const detail::Meta& meta = detail::meta(dtensor);
    if (dtensor.requires_grad()) {
      detail::saved<SpecPtr>(ctx, "from") = meta.spec;
      detail::saved<SpecPtr>(ctx, "to") = to;
      detail::saved<std::optional<Placements>>(ctx, "gradient") = gradient;
    }
    ctx->set_materialize_grads(false);
    World& world = to->mesh.world();
    std::optional<World::Scope> scope;
    if (*world.current_op() == '\0') scope.emplace(world, "redistribute_to");
    std::optional<CheckedStep> step;
    if (world.size() > 1 && Checked::enabled(world)) {
      step.emplace(world.check_state(), text_of_crossing(*meta.spec, *to));
    }
    const auto carry = [&] { return carry_across(meta.local(), *meta.spec, *to); };
    return detail::wrap(failing_if_own(world, "redistribute_to", carry), to);
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    if (!grads[0].defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
    const Spec& from = *detail::saved<SpecPtr>(ctx, "from");
    const auto& wanted = detail::saved<std::optional<Placements>>(ctx, "gradient");
    return {redistribute_to(detail::as_dtensor(grads[0], *detail::saved<SpecPtr>(ctx, "to")), from.mesh,
                            wanted ? *wanted : without_partial(from.placements)),
            at::Tensor(), at::Tensor()};
  }
};

// Copies the pieces to another device; `to` differs from the tensor's Spec in its mesh's device alone.
struct CopyToDevice : torch::autograd::Function<CopyToDevice> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& dtensor, const SpecPtr& to) {
    const detail::Meta& meta = detail::meta(dtensor);
    if (dtensor.requires_grad()) {
      detail::saved<SpecPtr>(ctx, "from") = meta.spec;
      detail::saved<SpecPtr>(ctx, "to") = to;
    }
    ctx->set_materialize_grads(false);
    const auto copy = [&] { return meta.local().to(to->mesh.device()); };
    return detail::wrap(failing_if_own(to->mesh.world(), "redistribute_to", copy), to);
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    if (!grads[0].defined()) return {at::Tensor(), at::Tensor()};
    const DeviceMesh& back = detail::saved<SpecPtr>(ctx, "from")->mesh;
    const at::Tensor g = detail::as_dtensor(grads[0], *detail::saved<SpecPtr>(ctx, "to"));
    const Spec& own = spec_of(g);
    const SpecPtr goal = intern_spec(back, own.placements, own.sizes, own.strides, own.dtype);
    return {detail::linear_in(g, [&](const at::Tensor& part) { return apply(part, goal); }), at::Tensor()};
  }
};

// Moves `dtensor` on its own type of device first, and then copies each rank's new piece to the other.
at::Tensor redistribute_to_device(const at::Tensor& dtensor, const DeviceMesh& mesh, const Placements& placements,
                                  const std::optional<Placements>& grad_placements) {
  const DeviceMesh here(mesh.world_ptr(), mesh_of(dtensor).device_type(), mesh.mesh());
  std::optional<Placements> gradient = grad_placements;
  // Where there is no gradient, nothing is copied here if the layout stays.
  if (!gradient && c10::GradMode::is_enabled() && dtensor.requires_grad()) {
    gradient = without_partial(placements_of(dtensor));
  }
  const at::Tensor moved = redistribute_to(dtensor, here, placements, gradient);
  const Spec& spec = spec_of(moved);
  const SpecPtr goal = intern_spec(mesh, spec.placements, spec.sizes, spec.strides, spec.dtype);
  return detail::linear_in(moved, [&](const at::Tensor& part) { return CopyToDevice::apply(part, goal); });
}

void check_world(const DeviceMesh& from, const DeviceMesh& to) {
  if (&from.world() == &to.world()) return;
  throw std::invalid_argument(fmt::format("redistribute_to: mesh {} is of another World than {}; give one of its World",
                                          to.to_string(), from.to_string()));
}

}  // namespace

at::Tensor redistribute_to(const at::Tensor& dtensor, const DeviceMesh& mesh, const Placements& placements,
                           const std::optional<Placements>& grad_placements) {
  const Spec& from = spec_of(dtensor);
  const detail::NotDeferred own_tensors;
  if (mesh == from.mesh) return redistribute(dtensor, placements, {.grad_placements = grad_placements});
  check_world(from.mesh, mesh);
  if (mesh.device_type() != from.mesh.device_type()) {
    return redistribute_to_device(dtensor, mesh, placements, grad_placements);
  }
  const Placements to = normalize(placements, mesh.mesh(), from.ndim(), "redistribute_to");
  std::optional<Placements> gradient;
  if (grad_placements) {
    const char* const who = "redistribute_to: grad_placements";
    gradient = normalize(*grad_placements, from.mesh.mesh(), from.ndim(), who);
    check_layout(*gradient, from.mesh.mesh(), from.sizes, who);
  }
  detail::check_current(dtensor, "redistribute_to");
  check_partials(to, from.dtype, "redistribute_to");
  check_layout(to, mesh.mesh(), from.sizes, "redistribute_to");
  detail::watch_gradient(dtensor);
  const SpecPtr goal = intern_spec(mesh, to, from.sizes, from.dtype);
  if (detail::has_tangent(dtensor)) {
    detail::refuse_nonlinear("redistribute_to", from);
    detail::refuse_nonlinear("redistribute_to", *goal);
  }
  return detail::linear_in(dtensor,
                           [&](const at::Tensor& part) { return RedistributeTo::apply(part, goal, gradient); });
}

}  // namespace tessera
