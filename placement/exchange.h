#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/placement/layout.h"

namespace tessera {

// The groups that some mesh dimensions span: the ranks that agree in all other coordinates. A member is numbered by its
// combined coordinate, the first of `mesh_dims` varying slowest.
class MergedDims {
 public:
  MergedDims(std::span<const int64_t> mesh_shape, std::vector<int64_t> mesh_dims);

  int64_t size() const { return size_; }
  const std::vector<int64_t>& mesh_dims() const { return mesh_dims_; }
  int64_t index_of(std::span<const int64_t> coordinate) const;
  // `coordinate` as member `index` of its group has it.
  std::vector<int64_t> coordinate_of(std::vector<int64_t> coordinate, int64_t index) const;

 private:
  std::vector<int64_t> mesh_shape_;
  std::vector<int64_t> mesh_dims_;
  int64_t size_ = 1;
};

// What moves to and from one rank when the ranks of its group go from one sharding to another. Each receives every
// element of its target tile that it does not hold, once. Where several hold an element, they take turns in sending it.
struct Exchange {
  Tile source;  // this rank's, before and after
  Tile target;
  std::vector<Tile> sends;     // to each member; its own: nothing
  std::vector<Tile> receives;  // from each member; its own: what stays
};
Exchange exchange_of(std::span<const int64_t> shape, const Placements& from, const Placements& to,
                     std::span<const int64_t> mesh_shape, const MergedDims& dims,
                     const std::vector<int64_t>& coordinate);

// The same when a tensor goes from one mesh to another; placements without Partial. The group are `ranks`, all of both
// meshes, one peer each in their order; `rank` is one of them.
Exchange exchange_between(std::span<const int64_t> shape, const Mesh& from_mesh, const Placements& from,
                          const Mesh& to_mesh, const Placements& to, const std::vector<int64_t>& ranks, int64_t rank);

// The same between any tiles, of which no element is held twice: member i holds sources[i] and needs targets[i].
// Targets may overlap.
Exchange exchange_of_tiles(const std::vector<Tile>& sources, const std::vector<Tile>& targets, int64_t me);

// Whether every rank of `to_mesh` has its piece already.
bool is_in_place(std::span<const int64_t> shape, const Mesh& from_mesh, const Placements& from, const Mesh& to_mesh,
                 const Placements& to);

// What an all_reduce over a group leaves in each of its ranks: the tiles of all, those that differ once each; `own` is
// this rank's.
struct Together {
  std::vector<Tile> tiles;
  std::size_t own = 0;
};
Together together_of(std::span<const int64_t> shape, const Placements& to, std::span<const int64_t> mesh_shape,
                     const MergedDims& dims, const std::vector<int64_t>& coordinate);

// Elements.
int64_t numel(const Tile& tile);
Tile intersect(const Tile& a, const Tile& b);
int64_t overlap(const Tile& a, const Tile& b);

}  // namespace tessera
