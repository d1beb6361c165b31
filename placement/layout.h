#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <c10/util/FunctionRef.h>
#include "tessera/mesh/mesh.h"
#include "tessera/placement/intervals.h"

#include "tessera/placement/placement.h"

namespace tessera {

// Describes the part of a tensor that a rank holds by one set of intervals per tensor dimension: an element belongs to
// it if each of its indexes is in the set of that dimension.
using Tile = std::vector<Intervals>;

// Describes one cut of a tensor dimension. A rank's part is numbered by its combined coordinate over `mesh_dims`, of
// which the first varies slowest.
struct Cut {
  const Partition* partition;
  std::vector<int64_t> mesh_dims;
  int64_t parts;  // the product of the sizes of these mesh dimensions
};

// Returns the cuts of `tensor_dim` in the order in which they are made. Mesh dimensions of size 1 cut nothing and are
// left out.
std::vector<Cut> cuts_of(int64_t tensor_dim, const Placements& placements, std::span<const int64_t> mesh_shape);

// Returns the part of a dimension of `size` elements that remains for the rank at `coordinate` after `cuts`.
Intervals part_of(int64_t size, const std::vector<Cut>& cuts, std::span<const int64_t> mesh_shape,
                  std::span<const int64_t> coordinate);

// Returns the tile of the rank at `coordinate`. `mesh_shape`, `coordinate` and `placements` have one entry per mesh
// dimension, and Shard dimensions are normalized. Replicate and Partial leave a tensor dimension whole.
Tile local_tile(std::span<const int64_t> shape, const Placements& placements, std::span<const int64_t> mesh_shape,
                std::span<const int64_t> coordinate);
std::vector<int64_t> local_shape(std::span<const int64_t> shape, const Placements& placements,
                                 std::span<const int64_t> mesh_shape, std::span<const int64_t> coordinate);
std::vector<int64_t> shape_of(const Tile& tile);

// Returns the placements with negative Shard dimensions counted from the end of a tensor of `ndim` dimensions, and with
// the smallest order numbers that say the same order of cuts.
// Throws std::invalid_argument, prefixed with `who`, unless there is one placement per mesh dimension and each Shard
// dimension is one of the tensor's.
Placements normalize(const Placements& placements, const Mesh& mesh, int64_t ndim, std::string_view who);

// Returns whether `fits` accepts every cut: it is called with each partition and each number of elements that this
// partition has to cut on some rank, which is `size` for the first cut and what the earlier cuts leave for the others.
// Where no later partition depends on sizes, one of these numbers stands for all.
bool every_cut(int64_t size, std::span<const Cut> cuts,
               c10::function_ref<bool(const Partition&, int64_t size, int64_t parts)> fits);

// Throws std::invalid_argument, prefixed with `who`, when normalized `placements` cannot cut a tensor of `shape`; see
// check_partition.
void check_layout(const Placements& placements, const Mesh& mesh, std::span<const int64_t> shape, std::string_view who);
// Returns whether check_layout would accept them.
bool is_layout(const Placements& placements, const Mesh& mesh, std::span<const int64_t> shape);

// Returns normalized `placements` with those cuts replaced that cannot be made beside placements[mesh_dim], which
// stays: a cut into a fixed number of parts or elements becomes a Shard of the same tensor dimension. If that does not
// suffice, the other mesh dimensions no longer cut the tensor dimension of placements[mesh_dim].
//   [RS(0,2,0,1,0), R] of shape [3] on {2, 2}, mesh_dim 1          -> [S(0), R]
//   [S(0), RS(0,5,0)]  of shape [5] on {2, 2}, mesh_dim 1          -> [R, RS(0,5,0)]
Placements fitted_around(int64_t mesh_dim, Placements placements, const Mesh& mesh, std::span<const int64_t> shape);

}  // namespace tessera
