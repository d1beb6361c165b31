#include "tessera/dtensor/local_gradients.h"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/TensorImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/world.h"
#include "tessera/placement/placement.h"

namespace tessera::detail {
namespace {

// Returns the parameters once each.
std::vector<at::Tensor> different(const std::vector<at::Tensor>& parameters, const char* op) {
  std::vector<at::Tensor> result;
  std::set<const c10::TensorImpl*> seen;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.defined()) {
      throw std::invalid_argument(fmt::format("{}: parameter {} is undefined; leave it out", op, result.size()));
    }
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) result.push_back(parameter);
  }
  return result;
}

std::vector<DeviceMesh> all_meshes(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> tensors = parameters;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) tensors.push_back(parameter.grad());
  }
  return meshes_of(tensors);
}

Placements settled_placements(const at::Tensor& parameter) {
  const at::Tensor& like =
      is_dtensor(parameter) && mesh_of(parameter) == mesh_of(parameter.grad()) ? parameter : parameter.grad();
  return without_partial(placements_of(like));
}

void reduce_pending(const std::vector<at::Tensor>& parameters, const DeviceMesh& mesh, const char* op) {
  std::vector<at::Tensor> owners, gradients;
  std::vector<Placements> placements;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined() || !is_dtensor(gradient) || mesh_of(gradient) != mesh) continue;
    if (!any_partial(placements_of(gradient))) continue;
    owners.push_back(parameter);
    gradients.push_back(gradient.detach());
    placements.push_back(settled_placements(parameter));
  }
  if (owners.empty()) return;
  const World::Scope scope(mesh.world(), op);
  const std::vector<at::Tensor> reduced = redistribute_many(gradients, placements);
  for (std::size_t i = 0; i < owners.size(); ++i) owners[i].mutable_grad() = reduced[i];
}

LocalGradient of_mesh(const at::Tensor& gradient, const std::vector<DeviceMesh>& meshes) {
  const DeviceMesh& mesh = mesh_of(gradient);
  LocalGradient local = {.piece = to_local(gradient),
                         .mesh = static_cast<std::size_t>(std::ranges::find(meshes, mesh) - meshes.begin()),
                         .is_cut = {}};
  for (const Placement& placement : placements_of(gradient)) local.is_cut.push_back(placement.is_shard());
  return local;
}

void check_dense(const at::Tensor& gradient, const char* op) {
  if (gradient.layout() == at::kStrided) return;
  throw std::invalid_argument(fmt::format("{}: a gradient of [{}] is sparse; make it dense (Embedding: sparse(false))",
                                          op, fmt::join(gradient.sizes(), ", ")));
}

}  // namespace

LocalGradients local_gradients(const std::vector<at::Tensor>& parameters, const char* op) {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> owners = different(parameters, op);
  LocalGradients all = {.meshes = all_meshes(owners), .gradients = {}};
  for (const at::Tensor& owner : owners) {
    if (owner.grad().defined() && !is_dtensor(owner.grad())) check_dense(owner.grad(), op);
  }
  for (const DeviceMesh& mesh : all.meshes) {
    if (mesh.is_member()) reduce_pending(owners, mesh, op);
  }
  for (const at::Tensor& owner : owners) {
    const at::Tensor& gradient = owner.grad();
    if (!gradient.defined()) continue;
    if (!is_dtensor(gradient)) {
      all.gradients.push_back({.piece = gradient.detach()});
    } else if (mesh_of(gradient).is_member()) {
      all.gradients.push_back(of_mesh(gradient.detach(), all.meshes));
    }
  }
  return all;
}

std::vector<std::vector<at::Tensor>> alike(const std::vector<LocalGradient>& gradients) {
  std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType>, std::vector<at::Tensor>> groups;
  for (const LocalGradient& each : gradients) {
    const c10::Device device = each.piece.device();
    if (each.piece.numel() > 0) groups[{device.type(), device.index(), each.piece.scalar_type()}].push_back(each.piece);
  }
  std::vector<std::vector<at::Tensor>> out;
  out.reserve(groups.size());
  for (auto& [key, group] : groups) out.push_back(std::move(group));
  return out;
}

}  // namespace tessera::detail
