#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "tessera/placement/layout.h"

namespace tessera::rules {

// Maps the tile of a rank's piece of the viewed tensor to the tile of the view that is a view of this piece. Returns
// nullopt where the elements are no tile, or the result would be no view of the piece.
using TileView = std::function<std::optional<Tile>(const Tile& tile)>;

// Maps to elements start, start + step, ... of a dimension, `length` of them. A piece of several intervals can only be
// sliced with step 1, since other steps are not evenly spaced within it.
TileView slice_tiles(int64_t dim, int64_t start, int64_t step, int64_t length);

// Returns the first element that a slice of a dimension of `size` elements takes, given the `start` argument of the
// call.
int64_t slice_start(std::optional<int64_t> asked, int64_t size);

// Maps to element `index` of a dimension, which is removed. A rank without that element has the
// empty set in every dimension.
TileView select_tiles(int64_t dim, int64_t index);

// Maps to the diagonal of two dimensions that the operator `diagonal` returns, `length` elements as the last dimension.
// Returns nullopt where a piece has several intervals of it.
TileView diagonal_tiles(int64_t dim1, int64_t dim2, int64_t offset, int64_t length);

// Returns the row and the column (the indices in dim1 and dim2) of the first element of the diagonal at `offset`.
struct DiagonalStart {
  int64_t row, column;
};
DiagonalStart diagonal_start(int64_t offset);

// Maps to the same elements in other dimensions, as view and reshape do. A dimension may have at most kMostIntervals
// intervals.
TileView regroup_tiles(const std::vector<int64_t>& from, const std::vector<int64_t>& to);
constexpr std::size_t kMostIntervals = 4096;

}  // namespace tessera::rules
