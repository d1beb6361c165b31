#include "tessera/ops/kernels/contract_activation.h"

#include <stdexcept>
#include <utility>
#include <vector>

#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient.h"
#include "tessera/placement/layout.h"

namespace tessera {
namespace {

Placements replicated_on(const DeviceMesh& mesh) {
  return Placements(static_cast<std::size_t>(mesh.ndim()), Replicate());
}

// Refuses a plain activation without this rank's part of the features that the product sums over. Where it has all of
// them and parts have one size, every rank sees that. Any other number this rank alone may have, so that it fails the
// job.
void check_features(const at::Tensor& piece, const std::vector<int64_t>& shape, const Placements& placements,
                    const Contract& contract, const DeviceMesh& mesh, std::string_view op) {
  const int64_t all = shape.back(), given = piece.size(-1), ranks = mesh.size(contract.mesh_dim);
  if (!mesh.is_member() || given * ranks == all) return;
  const int64_t mine = intern_spec(mesh, placements, shape, piece.scalar_type())->local_sizes.back();
  if (given == mine) return;
  const std::string where = fmt::format("{} with {}", op, detail::named(contract));
  const std::string text = fmt::format(
      "a plain input counts as this rank's piece {}, of {} of the {} features that the product sums over, and [{}] has "
      "{}; if it is the whole, give the style input_layouts = Replicate(), else pass this rank's piece, or a DTensor",
      to_string(contract.input), mine, all, fmt::join(piece.sizes(), ", "), given);
  if (given != all || mine * ranks != all) mesh.world().fail(where, text);
  throw std::invalid_argument(where + ": " + text);
}

// Returns the global shape of a plain activation that is a piece. If its last dimension is the one that the product
// sums over, the parameter tells its size; elsewhere the partition does, where it fixes one.
std::vector<int64_t> global_shape(const at::Tensor& piece, const Placements& placements, const Contract& contract,
                                  const at::Tensor& parameter, std::string_view op) {
  const DeviceMesh& mesh = mesh_of(parameter);
  std::vector<int64_t> shape = piece.sizes().vec();
  const Placement& cut = placements.at(static_cast<std::size_t>(contract.mesh_dim));
  if (!cut.is_shard()) return shape;
  int64_t& size = shape.at(static_cast<std::size_t>(cut.tensor_dim()));
  if ((op == "matmul" || op == "addmm") && cut.tensor_dim() == piece.dim() - 1) {
    size = parameter.size(0);
    check_features(piece, shape, placements, contract, mesh, op);
  } else {
    size = cut.partition().size().value_or(size * mesh.size(contract.mesh_dim));
  }
  return shape;
}

// Returns a plain activation as a DTensor: it is this rank's piece, laid out as the contract's input.
at::Tensor from_piece(const at::Tensor& piece, const Contract& contract, const at::Tensor& parameter,
                      std::string_view op) {
  const DeviceMesh& mesh = mesh_of(parameter);
  if (!contract.data_dims.empty() && !c10::InferenceMode::is_enabled()) {
    throw std::invalid_argument(fmt::format(
        "{} with {}: a plain activation [{}] on the mesh {} with data dimensions: nobody can know which part of "
        "the batch it is. Pass from_local(piece, mesh, {{Shard(0) on the data dimensions}}); if forward makes it for "
        "all ranks alike, such as positions, pass distribute_tensor(t, mesh, {{Replicate() on each}}), or leave the "
        "module out of the plan",
        op, contract.path, fmt::join(piece.sizes(), ", "), mesh.to_string()));
  }
  const Placements placements = normalize(detail::as_contract_says(replicated_on(mesh), contract, contract.input,
                                                                   mesh.mesh(), piece.sizes(), op, "plain input"),
                                          mesh.mesh(), piece.dim(), fmt::format("{} with {}", op, contract.path));
  FromLocalOptions options;
  options.shape = global_shape(piece, placements, contract, parameter, op);
  return from_local(piece, mesh, placements, options);
}

}  // namespace

namespace detail {

std::string named(const Contract& contract) { return fmt::format("{} ({})", contract.path, contract.style); }

Placements as_contract_says(const Placements& placements, const Contract& contract, const Placement& there,
                            const Mesh& mesh, at::IntArrayRef shape, std::string_view op, const char* what) {
  const auto ndim = static_cast<int64_t>(shape.size());
  Placements out = on_mesh_dim(placements, contract.mesh_dim, there, ndim);
  const Placement& placed = out.at(static_cast<std::size_t>(contract.mesh_dim));
  if (!placed.is_shard() || (placed.tensor_dim() >= 0 && placed.tensor_dim() < ndim))
    return fitted_around(contract.mesh_dim, std::move(out), mesh, shape);
  throw std::invalid_argument(fmt::format(
      "{} with {}: the style lays the {} out as {}, and it is [{}], of {} dimensions; give the style a layout that "
      "fits",
      op, named(contract), what, to_string(there), fmt::join(shape, ", "), ndim));
}

Activation activation_of(const at::Tensor& x, const Contract& contract, const at::Tensor& parameter,
                         std::string_view op) {
  Activation out{.tensor = is_dtensor(x) ? x : from_piece(x, contract, parameter, op), .desired = {}, .uses = {}};
  out.uses = add_reduction_hook(out.tensor);
  const Spec& spec = spec_of(out.tensor);
  if (!(spec.mesh == mesh_of(parameter))) {
    throw std::invalid_argument(fmt::format("{} with {}: the activation is {}, the parameter {}; put both on one mesh",
                                            op, contract.path, to_string(spec), to_string(spec_of(parameter))));
  }
  out.desired =
      as_contract_says(spec.placements, contract, contract.desired, spec.mesh.mesh(), spec.sizes, op, "input");
  return out;
}

}  // namespace detail
}  // namespace tessera
