#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/placement/layout.h"
#include "tessera/placement/placement.h"

namespace tessera {

// The inverse of local_tile: Shards, one a mesh dimension, under which the rank at each coordinate of a mesh of
// `mesh_shape` holds `tiles[i]`, i counting coordinates with the last varying fastest. The tiles must hold each element
// of a tensor of `shape` once.
//   shape (6), mesh (2), {0-2} and {2-6} -> [RS(0,2,4)]
// Tiles without elements may come out with other sizes, where those given fit no placements. Of several that say the
// same, the plainest, normalized: chunks, in some order; blocks; ragged sizes; lists of intervals. nullopt where no
// Shards say it: one mesh dimension would have to cut two tensor dimensions; or there is none to cut.
std::optional<Placements> layout_of_tiles(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape,
                                          const std::vector<Tile>& tiles);

}  // namespace tessera
