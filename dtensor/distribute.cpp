#include <stdexcept>

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/run_plan.h"
#include "tessera/dtensor/tensor.h"
#include "tessera/mesh/collectives.h"

namespace tessera {
namespace {

// The source's coordinate on the mesh, or nullopt when every rank takes its own values.
std::optional<std::vector<int64_t>> source_coordinate(const DeviceMesh& mesh, int64_t src_rank) {
  if (src_rank == kNoSource) return std::nullopt;
  const int64_t rank = src_rank == kMeshFirstRank ? mesh.mesh().ranks().front() : src_rank;
  auto coordinate = mesh.mesh().coordinate_of(rank);
  if (!coordinate) {
    throw std::invalid_argument(
        fmt::format("distribute_tensor: src_rank {} is not on the mesh {}; give one of its ranks, or kNoSource for each "
                    "rank's own values",
                    src_rank, mesh.mesh().to_string()));
  }
  return coordinate;
}

// `t` cut along `dim` into n parts, padded to one size and stacked: [n, *].
at::Tensor padded_rows(const at::Tensor& t, int64_t dim, int64_t n) {
  const int64_t full = chunk_range(t.size(dim), n, 0).size;
  std::vector<at::Tensor> rows;
  for (int64_t i = 0; i < n; ++i) {
    const Range range = chunk_range(t.size(dim), n, i);
    std::vector<int64_t> pad(static_cast<std::size_t>(2 * (t.dim() - dim)), 0);
    pad.back() = full - range.size;
    rows.push_back(at::constant_pad_nd(t.narrow(dim, range.offset, range.size), pad, 0));
  }
  return at::stack(rows);
}

// One mesh dimension's step: the source's piece, cut or whole, reaches each coordinate.
at::Tensor send_along(const at::Tensor& piece, const DeviceMesh& mesh, int64_t mesh_dim, const Placement& to,
                      int64_t source) {
  if (!to.is_shard()) return broadcast(piece.to(mesh.device()), mesh, mesh_dim, source);
  const int64_t n = mesh.size(mesh_dim);
  const int64_t dim = to.tensor_dim();
  const bool sends = mesh.local_rank(mesh_dim) == source;
  const Range mine = chunk_range(piece.size(dim), n, mesh.local_rank(mesh_dim));
  std::vector<int64_t> shape = piece.sizes().vec();
  shape[static_cast<std::size_t>(dim)] = chunk_range(piece.size(dim), n, 0).size;
  const at::Tensor like = at::empty(shape, piece.options().device(mesh.device()));
  const at::Tensor rows = sends ? padded_rows(piece, dim, n).to(mesh.device()) : at::Tensor();
  return scatter(rows, like, mesh, mesh_dim, source).narrow(dim, 0, mine.size);
}

at::Tensor piece_of(const at::Tensor& t, const Spec& spec, const std::optional<std::vector<int64_t>>& source) {
  if (!spec.mesh.is_member()) return at::empty({0}, t.options().device(spec.mesh.device()));
  const Placements replicated(spec.placements.size(), Replicate());
  at::Tensor piece = t.detach();
  if (source) {
    for (int64_t dim = 0; dim < spec.mesh.ndim(); ++dim) {
      const auto i = static_cast<std::size_t>(dim);
      piece = send_along(piece, spec.mesh, dim, spec.placements[i], (*source)[i]);
    }
  }
  // What no rank sent is cut or turned into a Partial here, which communicates nothing.
  Placements rest = spec.placements;
  Placements done = replicated;
  for (std::size_t i = 0; i < rest.size(); ++i) {
    if (source && rest[i].is_shard()) done[i] = rest[i];
  }
  const Spec whole{.id = 0,
                   .mesh = spec.mesh,
                   .placements = done,
                   .sizes = spec.sizes,
                   .strides = {},
                   .dtype = spec.dtype,
                   .box = {},
                   .local_sizes = {}};
  piece = redistribute_local(piece, whole, rest).to(spec.mesh.device());
  return piece.is_alias_of(t) ? piece.clone(at::MemoryFormat::Contiguous) : piece.contiguous();
}

SpecPtr spec_of_whole(const at::Tensor& t, const DeviceMesh& mesh, const Placements& given, const char* who) {
  const Placements placements = normalize(given, mesh.mesh(), t.dim(), who);
  check_partials(placements, t.scalar_type(), who);
  return intern_spec(mesh, placements, t.sizes(), contiguous_strides(t.sizes()), t.scalar_type());
}

struct Distribute : torch::autograd::Function<Distribute> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& t, const SpecPtr& spec,
                            const std::optional<std::vector<int64_t>>& source) {
    const World::Scope scope(spec->mesh.world(), "distribute_tensor");
    return detail::wrap(piece_of(t, *spec, source), spec);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               const torch::autograd::tensor_list& grads) {
    const at::Tensor& g = grads[0];
    return {g.defined() && is_dtensor(g) ? full_tensor(g) : g, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor distribute_tensor(const at::Tensor& t, const DeviceMesh& mesh, const Placements& placements, int64_t src_rank) {
  if (!t.defined()) throw std::invalid_argument("distribute_tensor: the tensor is undefined; give a tensor");
  const auto source = source_coordinate(mesh, src_rank);
  const SpecPtr spec = spec_of_whole(t, mesh, placements, "distribute_tensor");
  if (!is_dtensor(t)) return Distribute::apply(t, spec, source);
  if (mesh_of(t) == mesh && placements_of(t) == spec->placements) return t;
  throw std::invalid_argument(
      fmt::format("distribute_tensor: the tensor is a DTensor already, {}, and {} on {} is asked for; call redistribute",
                  to_string(t), to_string(spec->placements), mesh.to_string()));
}

void distribute_in_place(const at::Tensor& plain, const DeviceMesh& mesh, const Placements& placements, int64_t src_rank) {
  if (!plain.defined()) throw std::invalid_argument("distribute_in_place: the tensor is undefined; give a tensor");
  if (is_dtensor(plain) || plain.grad_fn()) {
    throw std::invalid_argument(
        fmt::format("distribute_in_place: the tensor is {}; give a plain leaf, such as a module's parameter",
                    is_dtensor(plain) ? "a DTensor already" : "the result of an operator"));
  }
  const auto source = source_coordinate(mesh, src_rank);
  const SpecPtr spec = spec_of_whole(plain, mesh, placements, "distribute_in_place");
  const World::Scope scope(mesh.world(), "distribute_tensor");
  const at::NoGradGuard no_grad;
  const at::Tensor& grad = plain.grad();
  if (grad.defined() && !is_dtensor(grad)) {
    // Partial values have Replicate gradients.
    const at::Tensor converted = distribute_tensor(grad, mesh, without_partial(spec->placements), src_rank);
    detail::convert_in_place(plain, piece_of(plain, *spec, source), spec);
    plain.mutable_grad() = converted;
    return;
  }
  detail::convert_in_place(plain, piece_of(plain, *spec, source), spec);
}

}  // namespace tessera
