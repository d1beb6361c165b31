#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "tessera/placement/layout.h"

namespace tessera::rules {

// Which elements of a view a rank holds whose piece of the viewed tensor is `tile`, the piece being viewed where it
// lies. nullopt where these are no Tile, or no view of the piece.
using TileView = std::function<std::optional<Tile>(const Tile& tile)>;

// Elements start, start + step, ... of a dimension, `length` of them. A piece of several intervals is sliced in steps
// of 1 alone: others do not lie evenly in it.
TileView slice_tiles(int64_t dim, int64_t start, int64_t step, int64_t length);

// The first element that a slice of a dimension of `size` elements takes, as its argument asks.
int64_t slice_start(std::optional<int64_t> asked, int64_t size);

// Element `index` of a dimension, which is gone then. Who does not have it holds nothing of any dimension.
TileView select_tiles(int64_t dim, int64_t index);

// The same elements in other dimensions, as view and reshape give them. At most kMostIntervals a dimension.
TileView regroup_tiles(const std::vector<int64_t>& from, const std::vector<int64_t>& to);
constexpr std::size_t kMostIntervals = 4096;

}  // namespace tessera::rules
