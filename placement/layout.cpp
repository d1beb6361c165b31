#include "tessera/placement/layout.h"

#include <algorithm>
#include <stdexcept>

#include <fmt/format.h>

namespace tessera {
namespace {

// torch.chunk's rule within `whole`.
Range chunk_of(const Range& whole, int64_t num_parts, int64_t index) {
  const int64_t full = whole.size / num_parts + (whole.size % num_parts != 0);
  const int64_t begin = std::min(index * full, whole.size);
  return {.offset = whole.offset + begin, .size = std::min(full, whole.size - begin)};
}

}  // namespace

Range chunk_range(int64_t dim_size, int64_t num_parts, int64_t index) {
  if (dim_size < 0 || num_parts < 1 || index < 0 || index >= num_parts) {
    throw std::invalid_argument(
        fmt::format("chunk_range: part {} of {} parts of {} elements does not exist; need a size of at least 0 and a part "
                    "in [0, {}), the "
                    "coordinate on the sharded mesh dimension, not the global rank",
                    index, num_parts, dim_size, num_parts));
  }
  return chunk_of({.offset = 0, .size = dim_size}, num_parts, index);
}

std::vector<Range> local_box(std::span<const int64_t> shape, const Placements& placements,
                             std::span<const int64_t> mesh_shape, std::span<const int64_t> coordinate) {
  std::vector<Range> box;
  box.reserve(shape.size());
  for (const int64_t size : shape) box.push_back({.offset = 0, .size = size});
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_shard()) continue;
    Range& range = box.at(static_cast<std::size_t>(placements[i].tensor_dim()));
    range = chunk_of(range, mesh_shape[i], coordinate[i]);
  }
  return box;
}

std::vector<int64_t> local_shape(std::span<const int64_t> shape, const Placements& placements,
                                 std::span<const int64_t> mesh_shape, std::span<const int64_t> coordinate) {
  std::vector<int64_t> out;
  out.reserve(shape.size());
  for (const Range& range : local_box(shape, placements, mesh_shape, coordinate)) out.push_back(range.size);
  return out;
}

Placements normalize(const Placements& placements, const Mesh& mesh, int64_t ndim, std::string_view who) {
  if (static_cast<int64_t>(placements.size()) != mesh.ndim()) {
    throw std::invalid_argument(
        fmt::format("{}: {} placements {} for the mesh {}, which has {} dimensions; give one placement a mesh dimension",
                    who, placements.size(), to_string(placements), mesh.to_string(), mesh.ndim()));
  }
  Placements out = placements;
  for (Placement& placement : out) {
    if (!placement.is_shard()) continue;
    const int64_t dim = placement.tensor_dim();
    if (dim < -ndim || dim >= ndim) {
      throw std::invalid_argument(fmt::format("{}: {} is outside a tensor of {} dimensions; its dimensions are [{}, {})",
                                              who, to_string(placement), ndim, -ndim, ndim));
    }
    if (dim < 0) placement = Shard(dim + ndim);
  }
  return out;
}

}  // namespace tessera
