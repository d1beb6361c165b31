#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/mesh/mesh.h"
#include "tessera/placement/placement.h"

namespace tessera {

// A part of one tensor dimension, in elements.
struct Range {
  int64_t offset = 0;
  int64_t size = 0;
  friend bool operator==(const Range&, const Range&) = default;
};

// Returns the part of a dimension of `dim_size` elements that part `index` of `num_parts` holds.
//   dim_size 10 over 4 -> sizes 3, 3, 3, 1
//   dim_size  3 over 4 -> sizes 1, 1, 1, 0
// Empty parts begin at dim_size. Source: torch.chunk, which PyTorch's Shard placement follows.
// Throws std::invalid_argument if dim_size < 0, num_parts < 1 or index is outside [0, num_parts).
Range chunk_range(int64_t dim_size, int64_t num_parts, int64_t index);

// The box of a tensor of `shape` that the rank at `coordinate` holds: one Range a tensor dimension, nested chunks for mesh
// dimensions that shard the same one. `mesh_shape`, `coordinate` and `placements` are as long as the mesh has dimensions.
// Shard dimensions are normalized. Replicate and Partial leave a dimension whole.
std::vector<Range> local_box(std::span<const int64_t> shape, const Placements& placements,
                             std::span<const int64_t> mesh_shape, std::span<const int64_t> coordinate);
std::vector<int64_t> local_shape(std::span<const int64_t> shape, const Placements& placements,
                                 std::span<const int64_t> mesh_shape, std::span<const int64_t> coordinate);

// The placements with negative Shard dimensions counted from the end of a tensor of `ndim` dimensions.
// Throws std::invalid_argument, prefixed with `who`, when there is not one placement a mesh dimension or a Shard dimension is
// outside the tensor's.
Placements normalize(const Placements& placements, const Mesh& mesh, int64_t ndim, std::string_view who);

}  // namespace tessera
