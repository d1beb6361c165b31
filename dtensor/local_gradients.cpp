#include "tessera/dtensor/local_gradients.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
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

std::size_t index_of(const DeviceMesh& mesh, const std::vector<DeviceMesh>& meshes) {
  return static_cast<std::size_t>(std::ranges::find(meshes, mesh) - meshes.begin());
}

LocalGradient of_mesh(const at::Tensor& gradient, const std::vector<DeviceMesh>& meshes) {
  LocalGradient local = {.piece = to_local(gradient), .mesh = index_of(mesh_of(gradient), meshes), .is_cut = {}};
  for (const Placement& placement : placements_of(gradient)) local.is_cut.push_back(placement.is_shard());
  return local;
}

// Returns LocalGradients::cut.
std::vector<std::vector<bool>> dims_that_cut(const std::vector<at::Tensor>& parameters,
                                             const std::vector<DeviceMesh>& meshes) {
  std::vector<std::vector<bool>> cut;
  for (const DeviceMesh& mesh : meshes) cut.emplace_back(static_cast<std::size_t>(mesh.ndim()));
  const auto add = [&](const at::Tensor& t) {
    const Placements& placements = placements_of(t);
    std::vector<bool>& dims = cut[index_of(mesh_of(t), meshes)];
    for (std::size_t i = 0; i < placements.size(); ++i) {
      if (placements[i].is_shard()) dims[i] = true;
    }
  };
  for (const at::Tensor& parameter : parameters) {
    if (parameter.requires_grad() && is_dtensor(parameter)) add(parameter);
    if (parameter.grad().defined() && is_dtensor(parameter.grad())) add(parameter.grad());
  }
  return cut;
}

// Gives a gradient that lies in memory of another one a copy: autograd may have given two parameters views of one
// tensor, such as two embeddings that were added to a batch of one, and what is done in place would be done twice.
void part_memory(const std::vector<at::Tensor>& parameters) {
  std::map<const std::byte*, const std::byte*> taken;  // where each begins and ends
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined() || (is_dtensor(gradient) && !mesh_of(gradient).is_member())) continue;
    const at::Tensor piece = (is_dtensor(gradient) ? to_local(gradient) : gradient).detach();
    if (piece.numel() == 0 || !piece.has_storage()) continue;
    int64_t last = 0;
    for (int64_t dim = 0; dim < piece.dim(); ++dim) last += (piece.size(dim) - 1) * piece.stride(dim);
    const auto* const begin = static_cast<const std::byte*>(piece.const_data_ptr());
    const std::byte* const end = begin + (last + 1) * static_cast<int64_t>(piece.element_size());
    const auto next = taken.lower_bound(end);  // the first that begins behind it
    if (next != taken.begin() && std::prev(next)->second > begin) {
      parameter.mutable_grad() = gradient.detach().clone();
    } else {
      taken.emplace(begin, end);
    }
  }
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
  LocalGradients all = {.meshes = all_meshes(owners), .cut = {}, .gradients = {}};
  for (const at::Tensor& owner : owners) {
    if (owner.grad().defined() && !is_dtensor(owner.grad())) check_dense(owner.grad(), op);
  }
  for (const DeviceMesh& mesh : all.meshes) {
    if (mesh.is_member()) reduce_pending(owners, mesh, op);
  }
  part_memory(owners);
  all.cut = dims_that_cut(owners, all.meshes);
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
