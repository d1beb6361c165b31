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

// The part of a tensor that a rank holds: the elements whose index lies, in every tensor dimension, in that one's
// intervals.
using Tile = std::vector<Intervals>;

// One cut of a tensor dimension: by the combined coordinate over some mesh dimensions, the first of them varying
// slowest.
struct Cut {
  const Partition* partition;
  std::vector<int64_t> mesh_dims;
  int64_t parts;  // the product of their sizes
};

// The cuts of `tensor_dim`, in the order in which they are made; mesh dimensions of one rank cut nothing.
std::vector<Cut> cuts_of(int64_t tensor_dim, const Placements& placements, std::span<const int64_t> mesh_shape);

// The part of a dimension of `size` elements that `cuts` leave to the rank at `coordinate`.
Intervals part_of(int64_t size, const std::vector<Cut>& cuts, std::span<const int64_t> mesh_shape,
                  std::span<const int64_t> coordinate);

// The tile of the rank at `coordinate`. `mesh_shape`, `coordinate` and `placements` are as long as the mesh has
// dimensions; Shard dimensions are normalized. Replicate and Partial leave a dimension whole.
Tile local_tile(std::span<const int64_t> shape, const Placements& placements, std::span<const int64_t> mesh_shape,
                std::span<const int64_t> coordinate);
std::vector<int64_t> local_shape(std::span<const int64_t> shape, const Placements& placements,
                                 std::span<const int64_t> mesh_shape, std::span<const int64_t> coordinate);
std::vector<int64_t> shape_of(const Tile& tile);

// The placements with negative Shard dimensions counted from the end of a tensor of `ndim` dimensions, and with the
// least orders that say the same.
// Throws std::invalid_argument, prefixed with `who`, when there is not one placement a mesh dimension or a Shard
// dimension is outside the tensor's.
Placements normalize(const Placements& placements, const Mesh& mesh, int64_t ndim, std::string_view who);

// Whether `fits` says yes to every partition, and every number of elements that it gets to cut on some rank: `size` for
// the first, what the cuts before leave for the others. Where no later cut asks for sizes, one of those stands for all.
bool every_cut(int64_t size, std::span<const Cut> cuts,
               c10::function_ref<bool(const Partition&, int64_t size, int64_t parts)> fits);

// Throws std::invalid_argument, prefixed with `who`, when normalized `placements` cannot cut a tensor of `shape`: see
// check_partition.
void check_layout(const Placements& placements, const Mesh& mesh, std::span<const int64_t> shape, std::string_view who);
// Whether they can.
bool is_layout(const Placements& placements, const Mesh& mesh, std::span<const int64_t> shape);

}  // namespace tessera
