// Defines DeviceMesh::from_group, which makes meshes over the caller's process groups.
#include <numeric>
#include <stdexcept>
#include <utility>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/device_type.h"

namespace tessera {
namespace {

using Group = c10::intrusive_ptr<c10d::Backend>;

// Returns the global ranks in the group's options; empty when there are none.
std::vector<int64_t> told_ranks(c10d::Backend& group) {
  try {
    const auto options = group.getBackendOptions();
    if (!options) return {};
    return {options->global_ranks_in_group.begin(), options->global_ranks_in_group.end()};
  } catch (const c10::Error&) {
    return {};  // this backend has no options
  }
}

void check_group(const DeviceMesh& mesh, int64_t mesh_dim, const Group& group) {
  const std::string name = mesh.mesh_dim_name(mesh_dim);
  if (!group) throw std::invalid_argument(fmt::format("from_group: the group for mesh dimension {} is null", name));
  const std::vector<int64_t>& ranks = mesh.group_ranks(mesh_dim);
  if (group->getSize() != mesh.size(mesh_dim)) {
    throw std::invalid_argument(
        fmt::format("from_group: the group for mesh dimension {} has {} ranks, but mesh {} has {} there: [{}]", name,
                    group->getSize(), mesh.to_string(), ranks.size(), fmt::join(ranks, ", ")));
  }
  if (group->getRank() != mesh.local_rank(mesh_dim)) {
    throw std::invalid_argument(fmt::format(
        "from_group: rank {} has position {} in the group for mesh dimension {} and coordinate {} there in mesh {}; "
        "give the mesh's ranks in the group's order",
        mesh.world().rank(), group->getRank(), name, mesh.local_rank(mesh_dim), mesh.to_string()));
  }
  const std::vector<int64_t> told = told_ranks(*group);
  if (!told.empty() && told != ranks) {
    throw std::invalid_argument(
        fmt::format("from_group: the group for mesh dimension {} is over ranks [{}], but mesh {} has [{}] there", name,
                    fmt::join(told, ", "), mesh.to_string(), fmt::join(ranks, ", ")));
  }
}

}  // namespace

DeviceMesh DeviceMesh::from_group(const std::vector<Group>& groups, const std::string& device, const Mesh& mesh,
                                  std::shared_ptr<World> world) {
  if (!world) world = World::from_environment();
  DeviceMesh made(std::move(world), parse_device("from_group", device), mesh);
  if (static_cast<int64_t>(groups.size()) != mesh.ndim()) {
    throw std::invalid_argument(
        fmt::format("from_group: {} groups for the {} mesh dimensions of mesh {}; give one each", groups.size(),
                    mesh.ndim(), mesh.to_string()));
  }
  if (!made.is_member()) {
    throw std::invalid_argument(fmt::format("from_group: rank {} is outside mesh {}; only its members have its groups",
                                            made.world().rank(), mesh.to_string()));
  }
  for (int64_t d = 0; d < mesh.ndim(); ++d) check_group(made, d, groups[static_cast<std::size_t>(d)]);
  for (int64_t d = 0; d < mesh.ndim(); ++d) {
    made.world().adopt(made.group_ranks(d), made.device_type(), groups[static_cast<std::size_t>(d)]);
  }
  return made;
}

DeviceMesh DeviceMesh::from_group(const Group& group, const std::string& device, const std::string& name,
                                  std::shared_ptr<World> world) {
  if (!group) throw std::invalid_argument("from_group: the group is null");
  if (!world) world = World::from_environment();
  std::vector<int64_t> ranks = told_ranks(*group);
  if (ranks.empty() && group->getSize() == world->size()) {
    ranks.resize(static_cast<std::size_t>(world->size()));
    std::iota(ranks.begin(), ranks.end(), int64_t{0});
  }
  if (ranks.empty()) {
    throw std::invalid_argument(
        fmt::format("from_group: the group of {} ranks does not tell which of the world's {} they are; set "
                    "global_ranks_in_group in its options, or give a Mesh over them",
                    group->getSize(), world->size()));
  }
  const auto size = static_cast<int64_t>(ranks.size());
  const std::vector<std::string> names = name.empty() ? std::vector<std::string>{} : std::vector<std::string>{name};
  return from_group(std::vector<Group>{group}, device, Mesh({size}, names, std::move(ranks)), std::move(world));
}

}  // namespace tessera
