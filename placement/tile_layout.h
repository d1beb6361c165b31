#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/placement/layout.h"
#include "tessera/placement/placement.h"

namespace tessera {

// Is the inverse of local_tile: returns Shards, one per mesh dimension, under which the rank at each coordinate of a
// mesh of `mesh_shape` holds `tiles[i]`, where i counts coordinates with the last varying fastest. The tiles must
// together hold each element of a tensor of `shape` once.
//   shape (6), mesh (2), {0-2} and {2-6} -> [RS(0,2,4)]
// A tile without elements may get other sizes than it was given where those fit no placements. Of several placements
// that describe the same tiles, the simplest is returned, normalized: chunks in some order, blocks, ragged sizes, lists
// of intervals. Returns nullopt where no Shards describe the tiles: one mesh dimension would have to cut two tensor
// dimensions, or there is no tensor dimension to cut.
std::optional<Placements> layout_of_tiles(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape,
                                          const std::vector<Tile>& tiles);

}  // namespace tessera
