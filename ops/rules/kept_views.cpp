#include "tessera/ops/rules/kept_views.h"

#include <algorithm>
#include <functional>

#include <c10/util/accumulate.h>

#include "tessera/placement/reduction.h"
#include "tessera/placement/tile_layout.h"

namespace tessera::rules {
namespace {

using Sizes = std::vector<int64_t>;

// Returns whether partitions of a fixed size or number of parts fit where they are.
bool fits(const Sizes& sizes, const Placements& cuts, std::span<const int64_t> mesh_shape) {
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    const auto as_fixed = [](const Partition& partition, int64_t size, int64_t parts) {
      return partition.parts().value_or(parts) == parts && partition.size().value_or(size) == size;
    };
    if (!every_cut(sizes[d], cuts_of(static_cast<int64_t>(d), cuts, mesh_shape), as_fixed)) return false;
  }
  return true;
}

// Describes the cuts of several tensors over the mesh dimensions that shard them: each tensor's Shards on these mesh
// dimensions, and the sizes of the mesh dimensions.
struct Cutting {
  std::vector<Placements> tensors;
  Sizes mesh_shape;
};

// Returns nullopt if the tensors' placements differ in more than how they are cut, if none is cut, if they are cut over
// more than 65,536 ranks, or if a reduction other than a plain one is pending, since it may depend on which elements a
// rank holds.
std::optional<Cutting> cutting(const std::vector<Placements>& tensors, std::span<const int64_t> mesh_shape) {
  constexpr int64_t kMostRanks = 1 << 16;
  Cutting out{.tensors = std::vector<Placements>(tensors.size()), .mesh_shape = {}};
  int64_t ranks = 1;
  for (std::size_t i = 0; i < mesh_shape.size(); ++i) {
    const Placement& first = tensors[0][i];
    if (first.is_partial() && first.reduction_ptr() != plain_reduction(first.reduction().op())) return std::nullopt;
    for (std::size_t j = 0; j < tensors.size(); ++j) {
      const Placement& p = tensors[j][i];
      if (p.is_shard() != first.is_shard() || (!p.is_shard() && p != first)) return std::nullopt;
      if (p.is_shard()) out.tensors[j].push_back(p);
    }
    if (!first.is_shard()) continue;
    out.mesh_shape.push_back(mesh_shape[i]);
    ranks *= mesh_shape[i];
  }
  if (out.mesh_shape.empty() || ranks > kMostRanks) return std::nullopt;
  return out;
}

// Returns `placements` with its Shards replaced by `cuts`.
Placements cut_by(Placements placements, const Placements& cuts) {
  std::size_t next = 0;
  for (Placement& p : placements) {
    if (p.is_shard()) p = cuts[next++];
  }
  return placements;
}

// Returns tile_at(coordinate) for each coordinate of a mesh, the last varying fastest; nullopt if it returns nullopt.
template <class TileAt>
std::optional<std::vector<Tile>> tiles_of(const Sizes& mesh_shape, const TileAt& tile_at) {
  const int64_t ranks = c10::multiply_integers(mesh_shape);
  std::vector<Tile> tiles;
  Sizes coordinate(mesh_shape.size(), 0);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::optional<Tile> tile = tile_at(coordinate);
    if (!tile) return std::nullopt;
    tiles.push_back(*std::move(tile));
    for (std::size_t i = coordinate.size(); i-- > 0 && ++coordinate[i] == mesh_shape[i];) coordinate[i] = 0;
  }
  return tiles;
}

// Returns the layout of a view of sizes `to`, where the viewed tensor has sizes `from` and layout `input`.
std::optional<Placements> viewed_layout(const Sizes& from, const Sizes& to, const TileView& view,
                                        const Placements& input, std::span<const int64_t> mesh_shape) {
  const std::optional<Cutting> cut = cutting({input}, mesh_shape);
  if (!cut || !fits(from, cut->tensors[0], cut->mesh_shape)) return std::nullopt;
  const auto tiles = tiles_of(cut->mesh_shape, [&](const Sizes& coordinate) {
    return view(local_tile(from, cut->tensors[0], cut->mesh_shape, coordinate));
  });
  const std::optional<Placements> found = tiles ? layout_of_tiles(to, cut->mesh_shape, *tiles) : std::nullopt;
  if (!found) return std::nullopt;
  return cut_by(input, *found);
}

// Returns the tile that the rank at `coordinate` holds after tensors of sizes `from` are concatenated along `dim`;
// nullopt if its pieces do not fit together.
std::optional<Tile> joined_tile(const std::vector<Sizes>& from, int64_t dim, const Cutting& cut,
                                const Sizes& coordinate) {
  const auto along = static_cast<std::size_t>(dim);
  std::optional<Tile> joined;
  Intervals mine;
  int64_t start = 0;
  for (std::size_t j = 0; j < from.size(); ++j) {
    Tile tile = local_tile(from[j], cut.tensors[j], cut.mesh_shape, coordinate);
    for (const Interval& part : tile[along]) append(mine, {start + part.begin, start + part.end});
    start += from[j][along];
    tile[along] = {};
    if (joined && *joined != tile) return std::nullopt;
    joined = std::move(tile);
  }
  (*joined)[along] = std::move(mine);
  return joined;
}

// Returns the layout of the concatenation, of sizes `to`, if each rank concatenates its pieces.
std::optional<Placements> joined_layout(const std::vector<Sizes>& from, const Sizes& to, int64_t dim,
                                        const std::vector<Placements>& inputs, std::span<const int64_t> mesh_shape) {
  const std::optional<Cutting> cut = cutting(inputs, mesh_shape);
  if (!cut) return std::nullopt;
  for (std::size_t j = 0; j < from.size(); ++j) {
    if (!fits(from[j], cut->tensors[j], cut->mesh_shape)) return std::nullopt;
  }
  const auto tiles =
      tiles_of(cut->mesh_shape, [&](const Sizes& coordinate) { return joined_tile(from, dim, *cut, coordinate); });
  const std::optional<Placements> found = tiles ? layout_of_tiles(to, cut->mesh_shape, *tiles) : std::nullopt;
  if (!found) return std::nullopt;
  // A piece without elements must have the sizes that the layout gives it.
  const auto said = tiles_of(cut->mesh_shape,
                             [&](const Sizes& c) { return std::optional(local_tile(to, *found, cut->mesh_shape, c)); });
  for (std::size_t i = 0; i < tiles->size(); ++i) {
    if (shape_of((*tiles)[i]) != shape_of((*said)[i])) return std::nullopt;
  }
  return cut_by(inputs[0], *found);
}

// Returns the placements of the tensor after a dimension is inserted at `dim`.
Placements lifted(Placements placements, int64_t dim) {
  for (Placement& p : placements) {
    if (p.is_shard() && p.tensor_dim() >= dim) p = p.on(p.tensor_dim() + 1);
  }
  return placements;
}

// Returns candidate layouts of a tensor, given the layout `part` of a part of it along `dim`: some of the part's cuts
// are replaced by Shard(dim). `has_dim` tells whether the part has that dimension.
std::vector<Placements> with_shards(const Placements& part, int64_t dim, bool has_dim) {
  constexpr std::size_t kMostTried = 5;  // mesh dimensions
  std::vector<Placements> out;
  const std::size_t n = part.size();
  for (uint32_t replaced = 1; n <= kMostTried && replaced < (uint32_t{1} << n); ++replaced) {
    Placements candidate = has_dim ? part : lifted(part, dim);
    bool cut = true;
    for (std::size_t i = 0; i < n; ++i) {
      if ((replaced >> i & 1) == 0) continue;
      cut = cut && part[i].is_shard();
      candidate[i] = Shard(dim);
    }
    if (cut) out.push_back(std::move(candidate));
  }
  return out;
}

// Returns the layout of a tensor of sizes `whole` in which the cuts of its part from `start` on are repeated along
// `dim`, so that equally cut parts of [q; k; v] are parts of one layout. Returns nullopt if the part is less than a
// quarter of the whole.
std::optional<Placements> repeated_layout(const Sizes& part, const Sizes& whole, int64_t dim, int64_t start,
                                          const Placements& layout, std::span<const int64_t> mesh_shape) {
  constexpr int64_t kMostCopies = 4;
  const auto along = static_cast<std::size_t>(dim);
  const int64_t length = part[along];
  const std::optional<Cutting> cut = cutting({layout}, mesh_shape);
  if (!cut || length == 0 || whole[along] > kMostCopies * length) return std::nullopt;
  const auto tiles = tiles_of(cut->mesh_shape, [&](const Sizes& coordinate) {
    Tile tile = local_tile(part, cut->tensors[0], cut->mesh_shape, coordinate);
    Intervals repeated;
    for (int64_t copy = start % length - length; copy < whole[along]; copy += length) {
      for (const Interval& i : tile[along]) {
        append(repeated, {std::max<int64_t>(copy + i.begin, 0), std::clamp<int64_t>(copy + i.end, 0, whole[along])});
      }
    }
    tile[along] = std::move(repeated);
    return std::optional(std::move(tile));
  });
  const std::optional<Placements> found = layout_of_tiles(whole, cut->mesh_shape, *tiles);
  if (!found) return std::nullopt;
  return cut_by(layout, *found);
}

// Returns whether the part from `start` on is one of several of the same length that make up the whole, each of which
// every rank holds equally.
bool is_one_of_equals(const Sizes& part, const Sizes& whole, int64_t dim, int64_t start, const Placements& layout) {
  const auto along = static_cast<std::size_t>(dim);
  if (part[along] == 0 || whole[along] % part[along] != 0 || start % part[along] != 0) return false;
  return std::ranges::all_of(layout, [&](const Placement& p) { return !p.is_shard(dim) || p.is_chunks(); });
}

// Returns candidate layouts of a tensor, given the layout of its diagonal of two dimensions.
std::vector<Placements> with_diagonal(const Placements& diagonal, int64_t diagonal_dim, int64_t dim1, int64_t dim2) {
  std::vector<Placements> out;
  for (const int64_t dim : {dim1, dim2}) {
    for (const bool plain : {true, false}) {
      Placements candidate = lifted(diagonal, std::min(dim1, dim2));
      candidate = lifted(std::move(candidate), std::max(dim1, dim2));
      for (std::size_t i = 0; i < diagonal.size(); ++i) {
        if (diagonal[i].is_shard(diagonal_dim)) candidate[i] = plain ? Placement(Shard(dim)) : diagonal[i].on(dim);
      }
      out.push_back(std::move(candidate));
    }
  }
  return out;
}

// Returns candidate layouts of the viewed tensor, given the view's.
using Candidates = std::function<std::vector<Placements>(const Placements&, std::span<const int64_t> mesh_shape)>;

// Sets OpRule::outputs_for so that the result, of sizes `sizes`, has the first candidate of which `view` gives input
// 0's layout.
void keep_viewed(OpRule& rule, const OpCall& call, const Sizes& sizes, TileView view, Candidates candidates) {
  rule.outputs_for = [=, to = call.inputs.at(0).sizes, view = std::move(view), candidates = std::move(candidates)](
                         const std::vector<Placements>& inputs,
                         std::span<const int64_t> mesh_shape) -> std::optional<std::vector<Placements>> {
    for (const Placements& candidate : candidates(inputs[0], mesh_shape)) {
      if (viewed_layout(sizes, to, view, candidate, mesh_shape) == inputs[0]) return std::vector<Placements>{candidate};
    }
    return std::nullopt;
  };
}

}  // namespace

void keep_cuts(OpRule& rule, const OpCall& call, std::vector<TileView> views, std::string_view kernel) {
  std::vector<Sizes> sizes;
  for (const TensorInfo& output : call.outputs) sizes.push_back(output.sizes);
  if (sizes.size() != views.size()) return;
  rule.keep_kernel = kernel;
  rule.outputs_for = [from = call.inputs.at(0).sizes, sizes = std::move(sizes), views = std::move(views)](
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

void keep_gradient(OpRule& rule, const OpCall& call, const std::vector<int64_t>& sizes, int64_t dim, TileView view,
                   std::optional<int64_t> start) {
  rule.keep_kernel = "parts_backward";
  const Candidates candidates = [=, to = call.inputs.at(0).sizes](const Placements& gradient,
                                                                  std::span<const int64_t> mesh_shape) {
    std::vector<Placements> out = with_shards(gradient, dim, to.size() == sizes.size());
    if (start) {
      std::optional<Placements> repeated = repeated_layout(to, sizes, dim, *start, gradient, mesh_shape);
      // Some layouts match both descriptions, such as that of the middle third over two ranks.
      const bool first = is_one_of_equals(to, sizes, dim, *start, gradient);
      if (repeated) out.insert(first ? out.begin() : out.end(), *std::move(repeated));
    }
    return out;
  };
  keep_viewed(rule, call, sizes, std::move(view), candidates);
}

void keep_diagonal_gradient(OpRule& rule, const OpCall& call, const std::vector<int64_t>& sizes, int64_t dim1,
                            int64_t dim2, int64_t offset) {
  const Sizes& to = call.inputs.at(0).sizes;
  if (to.size() + 1 != sizes.size()) return;  // LibTorch refuses it
  rule.keep_kernel = "diagonal_backward";
  const auto last = static_cast<int64_t>(to.size()) - 1;
  keep_viewed(
      rule, call, sizes, diagonal_tiles(dim1, dim2, offset, to.back()),
      [=](const Placements& gradient, std::span<const int64_t>) { return with_diagonal(gradient, last, dim1, dim2); });
}

void keep_joined(OpRule& rule, const OpCall& call, int64_t dim) {
  std::vector<Sizes> from;
  for (const TensorInfo& input : call.inputs) from.push_back(input.sizes);
  Sizes to = from[0];
  for (std::size_t j = 0; j < from.size(); ++j) {
    if (from[j].size() != to.size()) return;
    if (j > 0) to[static_cast<std::size_t>(dim)] += from[j][static_cast<std::size_t>(dim)];
  }
  // A term that is converted before it is reduced may overflow at another value.
  const bool converts =
      std::ranges::any_of(call.inputs, [&](const TensorInfo& input) { return input.dtype != call.inputs[0].dtype; });
  rule.outputs_for = [from = std::move(from), to = std::move(to), dim, converts](
                         const std::vector<Placements>& inputs,
                         std::span<const int64_t> mesh_shape) -> std::optional<std::vector<Placements>> {
    if (converts && std::ranges::any_of(inputs, any_partial)) return std::nullopt;
    std::optional<Placements> layout = joined_layout(from, to, dim, inputs, mesh_shape);
    if (!layout) return std::nullopt;
    return std::vector<Placements>{*std::move(layout)};
  };
}

}  // namespace tessera::rules
