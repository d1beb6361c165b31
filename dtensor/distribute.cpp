#include <algorithm>
#include <stdexcept>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/agreement.h"
#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/deferred/deferred.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient.h"
#include "tessera/dtensor/redistribute/region.h"
#include "tessera/dtensor/redistribute/route_execution.h"
#include "tessera/dtensor/saved.h"
#include "tessera/dtensor/tangent.h"
#include "tessera/mesh/check_state.h"
#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/core/in_memory.h"
#include "tessera/mesh/failing.h"
#include "tessera/placement/exchange.h"

namespace tessera {
namespace {

// Returns the source's coordinate on the mesh, or nullopt when every rank keeps its own values.
std::optional<std::vector<int64_t>> source_coordinate(const DeviceMesh& mesh, int64_t src_rank) {
  if (src_rank == kNoSource) return std::nullopt;
  const int64_t rank = src_rank == kMeshFirstRank ? mesh.mesh().ranks().front() : src_rank;
  auto coordinate = mesh.mesh().coordinate_of(rank);
  if (!coordinate) {
    throw std::invalid_argument(fmt::format(
        "distribute_tensor: src_rank {} is not on the mesh {}; give one of its ranks, or kNoSource for each "
        "rank's own values",
        src_rank, mesh.mesh().to_string()));
  }
  return coordinate;
}

// Returns the mesh dimensions that cut the tensor, or, with `cut` false, the others.
std::vector<int64_t> mesh_dims_where(const Spec& spec, bool cut) {
  std::vector<int64_t> out;
  for (std::size_t i = 0; i < spec.placements.size(); ++i) {
    if (spec.placements[i].is_shard() == cut) out.push_back(static_cast<int64_t>(i));
  }
  return out;
}

// Returns every rank's tile of the source's tensor `t`, flat and padded to one length: [n, length]. `cut` are the ranks
// that get one each.
at::Tensor padded_tiles(const at::Tensor& t, const Spec& spec, const MergedDims& cut,
                        const std::vector<int64_t>& coordinate, int64_t length) {
  const at::Tensor whole = t.contiguous();
  at::Tensor rows = at::zeros({cut.size(), length}, t.options());
  for (int64_t i = 0; i < cut.size(); ++i) {
    const Tile tile =
        local_tile(spec.sizes, spec.placements, spec.mesh.mesh().shape(), cut.coordinate_of(coordinate, i));
    Region(tile, spec.sizes).pack(whole, rows, i * length);
  }
  return rows;
}

// Returns this rank's tile. The source is the rank that has the source's coordinate on `mesh_dims`, which cut the
// tensor, and this rank's on the others. Runs one scatter over `mesh_dims` merged.
at::Tensor scatter_tiles(const at::Tensor& t, const Spec& spec, const std::vector<int64_t>& source,
                         const std::vector<int64_t>& mesh_dims) {
  const std::vector<int64_t>& coordinate = *spec.mesh.coordinate();
  const MergedDims cut(spec.mesh.mesh().shape(), mesh_dims);
  int64_t length = 0;
  for (int64_t i = 0; i < cut.size(); ++i) {
    length = std::max(length, numel(local_tile(spec.sizes, spec.placements, spec.mesh.mesh().shape(),
                                               cut.coordinate_of(coordinate, i))));
  }
  const at::Tensor like = at::empty({length}, t.options().device(spec.mesh.device()));
  at::Tensor rows;
  if (coordinate == source) {
    rows = failing(spec.mesh.world(), "distribute_tensor",
                   [&] { return padded_tiles(t, spec, cut, coordinate, length).to(spec.mesh.device()); });
  }
  const at::Tensor mine = scatter(rows, like, spec.mesh.merged(mesh_dims), 0, cut.index_of(source));
  return mine.narrow(0, 0, spec.local_numel()).view(spec.local_sizes);
}

// Returns this rank's tile of the source's `t`.
at::Tensor from_source(const at::Tensor& t, const Spec& spec, const std::vector<int64_t>& source) {
  World& world = spec.mesh.world();
  std::optional<CheckedStep> step;
  if (spec.mesh.size() > 1 && Checked::enabled(world)) step.emplace(world.check_state(), to_string(spec.placements));
  const std::vector<int64_t> cut = mesh_dims_where(spec, /*cut=*/true);
  const std::vector<int64_t> rest = mesh_dims_where(spec, /*cut=*/false);
  const MergedDims copies(spec.mesh.mesh().shape(), rest);
  const std::vector<int64_t>& coordinate = *spec.mesh.coordinate();
  const bool near = copies.index_of(coordinate) == copies.index_of(source);
  at::Tensor piece = at::empty(spec.local_sizes, t.options().device(spec.mesh.device()));
  if (near && !cut.empty()) {
    piece = scatter_tiles(t, spec, source, cut);
  } else if (near) {
    piece = failing(spec.mesh.world(), "distribute_tensor", [&] { return t.to(spec.mesh.device()); });
  }
  return rest.empty() ? piece : broadcast(piece, spec.mesh.merged(rest), 0, copies.index_of(source));
}

at::Tensor piece_made(const at::Tensor& t, const Spec& spec, const std::optional<std::vector<int64_t>>& source) {
  at::Tensor piece = failing(spec.mesh.world(), "distribute_tensor", [&] { return in_memory(t.detach()); });
  Placements sent(spec.placements.size(), Replicate());
  if (source) {
    piece = from_source(piece, spec, *source);
    sent = without_partial(spec.placements);
  }
  // This cuts what no rank sent, and forms Partials; neither communicates.
  piece = redistribute_local(piece, *with_placements(spec, sent), spec.placements).to(spec.mesh.device());
  return piece.is_alias_of(t) ? piece.clone(at::MemoryFormat::Contiguous) : piece.contiguous();
}

// Returns this rank's piece of the source's `t`, or of its own.
at::Tensor piece_of(const at::Tensor& t, const Spec& spec, const std::optional<std::vector<int64_t>>& source) {
  if (!spec.mesh.is_member()) return at::empty({0}, t.options().device(spec.mesh.device()));
  return failing_if_own(spec.mesh.world(), "distribute_tensor", [&] { return piece_made(t, spec, source); });
}

SpecPtr spec_of_whole(const at::Tensor& t, const DeviceMesh& mesh, const Placements& given, const char* who) {
  if (t.is_quantized()) {
    throw std::invalid_argument(
        fmt::format("{}: the tensor is quantized, {}; dequantize it first", who, c10::toString(t.scalar_type())));
  }
  const Placements placements = normalize(given, mesh.mesh(), t.dim(), who);
  check_partials(placements, t.scalar_type(), who);
  return intern_spec(mesh, placements, t.sizes(), tessera::contiguous_strides(t.sizes()), t.scalar_type());
}

struct Distribute : torch::autograd::Function<Distribute> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& t, const SpecPtr& spec,
                            const std::optional<std::vector<int64_t>>& source) {
    ctx->saved_data["device"] = t.device();
    ctx->set_materialize_grads(false);  // no zeros for a DTensor that took no part in the loss
    const World::Scope scope(spec->mesh.world(), "distribute_tensor");
    return detail::wrap(piece_of(t, *spec, source), spec);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const at::Tensor& g = grads[0];
    if (!g.defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
    const at::Tensor whole = is_dtensor(g) ? detail::whole_gradient(g, detail::is_shared(g)) : g;
    // The tensor that was given may be on another device than the mesh.
    return {whole.to(ctx->saved_data["device"].toDevice()), at::Tensor(), at::Tensor()};
  }
};

// Each rank tells the others whether its tensor has a tangent, since whether the tangent is sent must be known to all.
void agree_on_tangent(const at::Tensor& t, const DeviceMesh& mesh) {
  const auto text = [&] { return std::string(detail::has_tangent(t) ? "has a tangent" : "has no tangent"); };
  Agreement({mesh}, "distribute_tensor")
      .run([] {}, text,
           "in forward mode the tensor has a tangent on some ranks and none on others; give every rank one, of zeros "
           "where its values are not the ones that are sent");
}

}  // namespace

at::Tensor distribute_tensor(const at::Tensor& t, const DeviceMesh& mesh, const Placements& placements,
                             int64_t src_rank) {
  if (!t.defined()) throw std::invalid_argument("distribute_tensor: the tensor is undefined; give a tensor");
  detail::refuse_deferred("distribute_tensor", t);
  const detail::NotDeferred own_tensors;
  const auto source = source_coordinate(mesh, src_rank);
  const SpecPtr spec = spec_of_whole(t, mesh, placements, "distribute_tensor");
  if (!is_dtensor(t)) {
    if (detail::in_forward_mode() && source) agree_on_tangent(t, mesh);
    if (detail::has_tangent(t)) detail::refuse_nonlinear("distribute_tensor", *spec);
    return detail::linear_in(t, [&](const at::Tensor& part) { return Distribute::apply(part, spec, source); });
  }
  if (mesh_of(t) == mesh && placements_of(t) == spec->placements) return t;
  throw std::invalid_argument(fmt::format(
      "distribute_tensor: the tensor is a DTensor already, {}, and {} on {} is asked for; call redistribute",
      to_string(t), to_string(spec->placements), mesh.to_string()));
}

void distribute_in_place(const at::Tensor& plain, const DeviceMesh& mesh, const Placements& placements,
                         int64_t src_rank) {
  if (!plain.defined()) throw std::invalid_argument("distribute_in_place: the tensor is undefined; give a tensor");
  if (is_dtensor(plain) || plain.grad_fn()) {
    throw std::invalid_argument(
        fmt::format("distribute_in_place: the tensor is {}; give a plain leaf, such as a module's parameter",
                    is_dtensor(plain) ? "a DTensor already" : "the result of an operator"));
  }
  if (detail::has_tangent(plain)) {
    throw std::invalid_argument(
        "distribute_in_place: the tensor has a forward-mode derivative; distribute it first, and its tangent by "
        "distribute_tensor, and make the dual of both");
  }
  const auto source = source_coordinate(mesh, src_rank);
  const SpecPtr spec = spec_of_whole(plain, mesh, placements, "distribute_in_place");
  if (detail::is_deferred(plain)) {
    detail::materialize(plain, spec);
    return;
  }
  const detail::NotDeferred own_tensors;
  const World::Scope scope(mesh.world(), "distribute_tensor");
  const at::NoGradGuard no_grad;
  const at::Tensor& grad = plain.grad();
  if (grad.defined() && !is_dtensor(grad)) {
    // The gradient of a Partial value is Replicate.
    const at::Tensor converted = distribute_tensor(grad, mesh, without_partial(spec->placements), src_rank);
    detail::convert_in_place(plain, piece_of(plain, *spec, source), spec);
    plain.mutable_grad() = converted;
    return;
  }
  detail::convert_in_place(plain, piece_of(plain, *spec, source), spec);
}

}  // namespace tessera
