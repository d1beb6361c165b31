#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/placement/layout.h"

namespace tessera {

// Describes the groups of ranks that some mesh dimensions span: the ranks of a group agree in all other coordinates. A
// member is numbered by its combined coordinate over `mesh_dims`, of which the first varies slowest.
class MergedDims {
 public:
  MergedDims(std::span<const int64_t> mesh_shape, std::vector<int64_t> mesh_dims);

  int64_t size() const { return size_; }
  const std::vector<int64_t>& mesh_dims() const { return mesh_dims_; }
  int64_t index_of(std::span<const int64_t> coordinate) const;
  // Returns `coordinate` with its entries for these mesh dimensions replaced by those of member `index` of the group.
  std::vector<int64_t> coordinate_of(std::vector<int64_t> coordinate, int64_t index) const;

 private:
  std::vector<int64_t> mesh_shape_;
  std::vector<int64_t> mesh_dims_;
  int64_t size_ = 1;
};

// Lists what one rank sends and receives when the ranks of its group change from one sharding to another. Each rank
// receives once every element of its target tile that it does not hold. Where several ranks hold an element, they take
// turns in sending it to the ranks that need it.
struct Exchange {
  Tile source;                 // this rank's tile before the exchange
  Tile target;                 // this rank's tile after it
  std::vector<Tile> sends;     // what it sends to each member; nothing for itself
  std::vector<Tile> receives;  // what it receives from each member; for itself, what it keeps
};
Exchange exchange_of(std::span<const int64_t> shape, const Placements& from, const Placements& to,
                     std::span<const int64_t> mesh_shape, const MergedDims& dims,
                     const std::vector<int64_t>& coordinate);

// Returns the exchange of a tensor that changes from one mesh to another. Neither side may have Partial placements. The
// group consists of `ranks`: every rank of both meshes, numbered in this order. `rank` is one of them.
Exchange exchange_between(std::span<const int64_t> shape, const Mesh& from_mesh, const Placements& from,
                          const Mesh& to_mesh, const Placements& to, const std::vector<int64_t>& ranks, int64_t rank);

// Returns the exchange between any tiles: member i holds sources[i] and needs targets[i]. No two sources may overlap;
// targets may.
Exchange exchange_of_tiles(const std::vector<Tile>& sources, const std::vector<Tile>& targets, int64_t me);

// Returns whether every rank of `to_mesh` already holds its piece.
bool is_in_place(std::span<const int64_t> shape, const Mesh& from_mesh, const Placements& from, const Mesh& to_mesh,
                 const Placements& to);

// Lists what every rank of a group holds after an all_reduce over it: the tiles of all its members, each different tile
// once. `own` is the index of this rank's tile in `tiles`.
struct GroupTiles {
  std::vector<Tile> tiles;
  std::size_t own = 0;
};
GroupTiles group_tiles_of(std::span<const int64_t> shape, const Placements& to, std::span<const int64_t> mesh_shape,
                          const MergedDims& dims, const std::vector<int64_t>& coordinate);

// Return a number of elements (numel, overlap) or the elements that are in both tiles (intersect).
int64_t numel(const Tile& tile);
Tile intersect(const Tile& a, const Tile& b);
int64_t overlap(const Tile& a, const Tile& b);

}  // namespace tessera
