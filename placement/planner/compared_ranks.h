#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "tessera/placement/placement.h"

namespace tessera {

constexpr std::size_t kMostMeshDims = 12;  // plans are made for meshes of at most this many dimensions

// The most ranks of a mesh on which all are compared.
constexpr int64_t kCompareAll = 64;

// Lists the ranks of a mesh that are considered when layouts are compared: all of them, or those at some coordinates of
// every mesh dimension.
struct ComparedRanks {
  explicit ComparedRanks(std::span<const int64_t> mesh_shape, const std::vector<std::set<int64_t>>& some = {});

  std::size_t count() const { return coordinates.size(); }
  // Returns the rank at coordinate 0 of `mesh_dims` (a bit for each) and at `rank`'s coordinates elsewhere.
  std::size_t first_of_group(std::size_t rank, uint32_t mesh_dims) const;
  // Returns the first rank of each group along `mesh_dims`, ascending.
  std::vector<std::size_t> first_ranks(uint32_t mesh_dims) const;
  // Returns how many these are.
  std::size_t num_groups(uint32_t mesh_dims) const;
  // Returns all mesh dimensions.
  uint32_t every() const { return static_cast<uint32_t>(sizes_of_groups.size()) - 1; }
  // Returns the product of the sizes of these mesh dimensions.
  int64_t ranks_of(uint32_t mesh_dims) const { return sizes_of_groups[mesh_dims]; }

  std::vector<int64_t> mesh_shape;
  std::vector<std::vector<int64_t>> coordinates;  // of the compared ranks, ascending
  std::vector<std::size_t> counts;       // of the compared coordinates of each mesh dimension, of which 0 is one
  int64_t ranks = 1;                     // of the mesh
  std::vector<int64_t> sizes_of_groups;  // [mesh dimensions as bits]: the product of their sizes
  bool all = true;
};

// Returns all ranks. On a mesh of more than kCompareAll, if `sample`, returns those at the first, second and last
// coordinates and where one mesh dimension alone has the largest and the smallest parts of a tensor of `shape`, under
// any of choices[mesh dimension].
ComparedRanks compared_ranks(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape,
                             const std::vector<Placements>& choices, bool sample);

}  // namespace tessera
