#include "tessera/ops/rules/kept_views.h"

#include "tessera/placement/reduction.h"
#include "tessera/placement/tile_layout.h"

namespace tessera::rules {
namespace {

using Sizes = std::vector<int64_t>;

// Whether partitions of a fixed size or number of parts stand where they fit.
bool fits(const Sizes& sizes, const Placements& cuts, std::span<const int64_t> mesh_shape) {
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    const auto as_fixed = [](const Partition& partition, int64_t size, int64_t parts) {
      return partition.parts().value_or(parts) == parts && partition.size().value_or(size) == size;
    };
    if (!every_cut(sizes[d], cuts_of(static_cast<int64_t>(d), cuts, mesh_shape), as_fixed)) return false;
  }
  return true;
}

// The layout of a view of sizes `to` of a tensor of sizes `from` in layout `input`: reductions other than the plain ones may not
// know what becomes of their elements.
std::optional<Placements> viewed_layout(const Sizes& from, const Sizes& to, const TileView& view, const Placements& input,
                                        std::span<const int64_t> mesh_shape) {
  constexpr int64_t kMostRanks = 1 << 16;
  Placements cuts;
  Sizes cut_by;  // sizes of the mesh dimensions that cut
  int64_t ranks = 1;
  for (std::size_t i = 0; i < input.size(); ++i) {
    if (input[i].is_partial() && input[i].reduction_ptr() != plain_reduction(input[i].reduction().op())) return std::nullopt;
    if (!input[i].is_shard()) continue;
    cuts.push_back(input[i]);
    cut_by.push_back(mesh_shape[i]);
    ranks *= mesh_shape[i];
  }
  if (cuts.empty() || ranks > kMostRanks || !fits(from, cuts, cut_by)) return std::nullopt;
  std::vector<Tile> tiles;
  Sizes coordinate(cut_by.size(), 0);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::optional<Tile> tile = view(local_tile(from, cuts, cut_by, coordinate));
    if (!tile) return std::nullopt;
    tiles.push_back(*std::move(tile));
    for (std::size_t i = coordinate.size(); i-- > 0 && ++coordinate[i] == cut_by[i];) coordinate[i] = 0;
  }
  const std::optional<Placements> found = layout_of_tiles(to, cut_by, tiles);
  if (!found) return std::nullopt;
  Placements out = input;
  std::size_t next = 0;
  for (Placement& p : out) {
    if (p.is_shard()) p = (*found)[next++];
  }
  return out;
}

// The placements of a tensor that has dimension `dim` more.
Placements lifted(Placements placements, int64_t dim) {
  for (Placement& p : placements) {
    if (p.is_shard() && p.tensor_dim() >= dim) p = p.on(p.tensor_dim() + 1);
  }
  return placements;
}

}  // namespace

void keep_cuts(OpRule& rule, const OpCall& call, std::vector<TileView> views, std::string_view kernel) {
  std::vector<Sizes> sizes;
  for (const TensorInfo& output : call.outputs) sizes.push_back(output.sizes);
  if (sizes.size() != views.size()) return;
  rule.keep_kernel = kernel;
  rule.keep = [from = call.inputs.at(0).sizes, sizes = std::move(sizes), views = std::move(views)](
                  const std::vector<Placements>& inputs,
                  std::span<const int64_t> mesh_shape) -> std::optional<std::vector<Placements>> {
    std::vector<Placements> out;
    for (std::size_t k = 0; k < views.size(); ++k) {
      std::optional<Placements> layout = viewed_layout(from, sizes[k], views[k], inputs[0], mesh_shape);
      if (!layout) return std::nullopt;
      out.push_back(*std::move(layout));
    }
    return out;
  };
}

void keep_gradient(OpRule& rule, const OpCall& call, const std::vector<int64_t>& sizes, int64_t dim, TileView view) {
  rule.keep_kernel = "parts_backward";
  rule.keep = [=, to = call.inputs.at(0).sizes, view = std::move(view)](
                  const std::vector<Placements>& inputs,
                  std::span<const int64_t> mesh_shape) -> std::optional<std::vector<Placements>> {
    constexpr std::size_t kMostTried = 5;  // of mesh dimensions
    const std::size_t n = inputs[0].size();
    if (n > kMostTried) return std::nullopt;
    for (uint32_t replaced = 1; replaced < (uint32_t{1} << n); ++replaced) {
      Placements candidate = to.size() == sizes.size() ? inputs[0] : lifted(inputs[0], dim);
      bool cut = true;
      for (std::size_t i = 0; i < n; ++i) {
        if ((replaced >> i & 1) == 0) continue;
        cut = cut && inputs[0][i].is_shard();
        candidate[i] = Shard(dim);
      }
      if (cut && viewed_layout(sizes, to, view, candidate, mesh_shape) == inputs[0])
        return std::vector<Placements>{candidate};
    }
    return std::nullopt;
  };
}

}  // namespace tessera::rules
