#include "tessera/dtensor/over_meshes.h"

#include <algorithm>
#include <cstdint>
#include <set>

#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/world.h"

namespace tessera {
namespace {

using RankSet = std::set<int64_t>;

RankSet ranks_of(const DeviceMesh& mesh) { return {mesh.mesh().ranks().begin(), mesh.mesh().ranks().end()}; }

// Returns the meshes that are not within another one; of equal ones the first.
std::vector<DeviceMesh> outermost(const std::vector<DeviceMesh>& meshes) {
  std::vector<DeviceMesh> result;
  for (std::size_t i = 0; i < meshes.size(); ++i) {
    const RankSet mine = ranks_of(meshes[i]);
    bool within = false;
    for (std::size_t j = 0; j < meshes.size() && !within; ++j) {
      const RankSet other = ranks_of(meshes[j]);
      within = j != i && std::ranges::includes(other, mine) && (other != mine || j < i);
    }
    if (!within) result.push_back(meshes[i]);
  }
  return result;
}

// Says whether one can go from every mesh to every other one over ranks that meshes share.
bool are_connected(const std::vector<DeviceMesh>& meshes) {
  RankSet reached = ranks_of(meshes.front());
  std::vector<bool> joined(meshes.size());
  for (std::size_t round = 0; round < meshes.size(); ++round) {
    for (std::size_t i = 0; i < meshes.size(); ++i) {
      const RankSet ranks = ranks_of(meshes[i]);
      if (std::ranges::none_of(ranks, [&](int64_t rank) { return reached.contains(rank); })) continue;
      reached.insert(ranks.begin(), ranks.end());
      joined[i] = true;
    }
  }
  return std::ranges::all_of(joined, [](bool each) { return each; });
}

// Returns the 1-D mesh of the ranks of all meshes.
DeviceMesh joined(const std::vector<DeviceMesh>& meshes) {
  RankSet ranks;
  for (const DeviceMesh& mesh : meshes) ranks.merge(ranks_of(mesh));
  return {meshes.front().world_ptr(), meshes.front().device_type(),
          Mesh({static_cast<int64_t>(ranks.size())}, {"all_meshes"}, {ranks.begin(), ranks.end()})};
}

}  // namespace

at::Tensor max_over_meshes(at::Tensor values, const std::vector<DeviceMesh>& meshes, const char* op) {
  if (meshes.empty()) return values;
  std::vector<DeviceMesh> over = outermost(meshes);
  if (!are_connected(over)) over = {joined(over)};
  const World::Scope scope(meshes.front().world(), op);
  for (std::size_t round = 0; round < over.size(); ++round) {
    for (const DeviceMesh& mesh : over) {
      if (!mesh.is_member()) continue;
      values = values.to(mesh.device());
      for (int64_t dim = 0; dim < mesh.ndim(); ++dim) values = all_reduce(values, mesh, dim, ReduceOp::kMax);
    }
  }
  return values.to(meshes.front().device());
}

}  // namespace tessera
