#include "tessera/placement/tile_layout.h"

#include <algorithm>
#include <numeric>

namespace tessera {
namespace {

// Says how the ranks of some mesh dimensions cut one tensor dimension.
struct DimCut {
  int64_t tensor_dim;
  int64_t size;
  std::vector<std::size_t> mesh_dims;
  std::vector<int64_t> mesh_shape;  // of these mesh dimensions
  std::vector<Intervals> parts;     // by their combined coordinate
};

// Says whether `placements`, one per mesh dimension of the cut, give the same parts.
bool says(const DimCut& cut, const Placements& placements) {
  const std::vector<Cut> cuts = cuts_of(cut.tensor_dim, placements, cut.mesh_shape);
  std::vector<int64_t> coordinate(cut.mesh_shape.size(), 0);
  for (const Intervals& part : cut.parts) {
    if (part_of(cut.size, cuts, cut.mesh_shape, coordinate) != part) return false;
    for (std::size_t i = coordinate.size(); i-- > 0 && ++coordinate[i] == cut.mesh_shape[i];) coordinate[i] = 0;
  }
  return true;
}

// Tries chunks, with every order of the mesh dimensions.
std::optional<Placements> as_chunks(const DimCut& cut) {
  std::vector<int64_t> orders(cut.mesh_dims.size());
  std::iota(orders.begin(), orders.end(), 0);
  do {
    Placements out;
    for (const int64_t order : orders) {
      const bool plain = std::ranges::is_sorted(orders);
      out.push_back(plain ? Shard(cut.tensor_dim) : Shard(cut.tensor_dim).ordered(order));
    }
    if (says(cut, out)) return out;
  } while (std::ranges::next_permutation(orders).found);
  return std::nullopt;
}

// Tries the same placement on all mesh dimensions of the cut.
std::optional<Placements> as_one(const DimCut& cut, const Placement& placement) {
  Placements out(cut.mesh_dims.size(), placement);
  return says(cut, out) ? std::optional(out) : std::nullopt;
}

std::optional<Placements> as_blocks(const DimCut& cut) {
  if (cut.parts[0].size() < 2) return std::nullopt;  // one block per rank: chunks describe it
  return as_one(cut, BlockCyclic(cut.tensor_dim, cut.parts[0][0].size()));
}

std::optional<Placements> as_sizes(const DimCut& cut) {
  std::vector<int64_t> sizes;
  for (const Intervals& part : cut.parts) {
    if (part.size() > 1) return std::nullopt;
    sizes.push_back(count(part));
  }
  return as_one(cut, RaggedShard(cut.tensor_dim, sizes));
}

std::optional<Placements> placements_of(const DimCut& cut) {
  int64_t all = 0;
  for (const Intervals& part : cut.parts) all += count(part);
  if (all != cut.size) return std::nullopt;
  if (auto out = as_chunks(cut)) return out;
  if (auto out = as_blocks(cut)) return out;
  if (auto out = as_sizes(cut)) return out;
  return as_one(cut, IntervalShard(cut.tensor_dim, cut.parts));
}

class Recovery {
 public:
  // With `exact`, a tile without elements must match in every dimension too.
  Recovery(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape, const std::vector<Tile>& tiles,
           bool exact)
      : shape_(shape), mesh_shape_(mesh_shape), tiles_(tiles), exact_(exact), strides_(mesh_shape.size(), 1) {
    for (std::size_t i = mesh_shape.size(); i-- > 1;) strides_[i - 1] = strides_[i] * mesh_shape[i];
  }

  std::optional<Placements> run() {
    if (shape_.empty() && !mesh_shape_.empty()) return std::nullopt;
    for (std::size_t i = 0; i < mesh_shape_.size(); ++i) {
      const std::optional<std::size_t> d = dim_cut_by(i);
      if (!d) return std::nullopt;
      cut_by_.push_back(*d);
    }
    Placements out;
    for (const std::size_t d : cut_by_) out.push_back(Shard(static_cast<int64_t>(d)));
    for (std::size_t d = 0; d < shape_.size(); ++d) {
      const DimCut cut = cut_of(d);
      if (cut.mesh_dims.empty()) continue;
      const std::optional<Placements> found = placements_of(cut);
      if (!found) return std::nullopt;
      for (std::size_t k = 0; k < found->size(); ++k) out[cut.mesh_dims[k]] = (*found)[k];
      cuts_.push_back(cut);
    }
    return is_product() ? std::optional(out) : std::nullopt;
  }

 private:
  int64_t coordinate(std::size_t rank, std::size_t mesh_dim) const {
    return static_cast<int64_t>(rank) / strides_[mesh_dim] % mesh_shape_[mesh_dim];
  }

  // Says whether the tile is to be ignored: it holds no elements, and the match need not be exact.
  bool is_missing(const Tile& tile) const {
    return !exact_ && std::ranges::any_of(tile, [](const Intervals& part) { return part.empty(); });
  }

  // Returns the tensor dimension in which the tiles of ranks that differ in this coordinate alone differ. Where at most
  // one of those tiles holds elements, it may be any: the first dimension without elements, or else the longest one.
  std::optional<std::size_t> dim_cut_by(std::size_t mesh_dim) const {
    std::optional<std::size_t> out;
    for (std::size_t r = 0; r < tiles_.size(); ++r) {
      const auto first = r - static_cast<std::size_t>(coordinate(r, mesh_dim) * strides_[mesh_dim]);
      for (std::size_t other = first; other < r; other += static_cast<std::size_t>(strides_[mesh_dim])) {
        if (is_missing(tiles_[r]) || is_missing(tiles_[other])) continue;
        for (std::size_t d = 0; d < shape_.size(); ++d) {
          if (tiles_[r][d] == tiles_[other][d]) continue;
          if (out && *out != d) return std::nullopt;
          out = d;
        }
      }
    }
    if (out) return out;
    const auto empty = std::ranges::find(shape_, 0);
    return static_cast<std::size_t>((empty != shape_.end() ? empty : std::ranges::max_element(shape_)) -
                                    shape_.begin());
  }

  DimCut cut_of(std::size_t d) const {
    DimCut out{.tensor_dim = static_cast<int64_t>(d), .size = shape_[d]};
    int64_t parts = 1;
    for (std::size_t i = 0; i < mesh_shape_.size(); ++i) {
      if (cut_by_[i] != d || mesh_shape_[i] == 1) continue;
      out.mesh_dims.push_back(i);
      out.mesh_shape.push_back(mesh_shape_[i]);
      parts *= mesh_shape_[i];
    }
    out.parts.resize(static_cast<std::size_t>(parts));
    for (std::size_t r = 0; r < tiles_.size(); ++r) {
      if (!is_missing(tiles_[r])) out.parts[index(out, r)] = tiles_[r][d];
    }
    return out;
  }

  std::size_t index(const DimCut& cut, std::size_t rank) const {
    int64_t out = 0;
    for (const std::size_t i : cut.mesh_dims) out = out * mesh_shape_[i] + coordinate(rank, i);
    return static_cast<std::size_t>(out);
  }

  bool is_cut(std::size_t d) const {
    return std::ranges::any_of(cuts_, [&](const DimCut& cut) { return cut.tensor_dim == static_cast<int64_t>(d); });
  }

  // Says whether every tile is the product of the parts of its cut dimensions, and is whole in the other dimensions.
  bool is_product() const {
    for (std::size_t r = 0; r < tiles_.size(); ++r) {
      const bool none = is_missing(tiles_[r]);
      bool found_none = false;
      for (const DimCut& cut : cuts_) {
        const Intervals& part = cut.parts[index(cut, r)];
        found_none |= part.empty();
        if (!none && part != tiles_[r][static_cast<std::size_t>(cut.tensor_dim)]) return false;
      }
      if (none && !found_none) return false;
      for (std::size_t d = 0; d < shape_.size() && !none; ++d) {
        if (!is_cut(d) && count(tiles_[r][d]) != shape_[d]) return false;
      }
    }
    return true;
  }

  std::span<const int64_t> shape_;
  std::span<const int64_t> mesh_shape_;
  const std::vector<Tile>& tiles_;
  const bool exact_;
  std::vector<int64_t> strides_;     // by mesh dimension, of a rank's index
  std::vector<std::size_t> cut_by_;  // [mesh dimension]: the tensor dimension that it cuts
  std::vector<DimCut> cuts_;
};

}  // namespace

std::optional<Placements> layout_of_tiles(std::span<const int64_t> shape, std::span<const int64_t> mesh_shape,
                                          const std::vector<Tile>& tiles) {
  std::optional<Placements> out = Recovery(shape, mesh_shape, tiles, /*exact=*/true).run();
  return out ? out : Recovery(shape, mesh_shape, tiles, /*exact=*/false).run();
}

}  // namespace tessera
