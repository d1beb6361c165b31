#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/mesh.h"
#include "tessera/placement/intervals.h"
#include "tessera/placement/layout.h"
#include "tessera/placement/placement.h"

namespace tessera {

// Describes one cell of a picture of a layout: a box of the tensor that all ranks hold whole or not at all.
struct LayoutCell {
  std::vector<int64_t> ranks;  // the ranks that hold it, ascending by coordinate
  std::string text;            // "0", "0, 1" where both hold it, "sum(0, 1)" where it is pending
  bool pending = false;
};

// Describes one slice of a picture: its cells, row by row, and where it lies in the tensor.
struct LayoutSlice {
  std::string text;           // "[0-2, :, :]", or "" for the only slice
  std::vector<Interval> box;  // its part of each tensor dimension; the whole of those that rows and columns cut
  std::vector<LayoutCell> cells;
};

// Says which rank holds which part of a tensor, as rows and columns along two tensor dimensions, one slice for each
// cell of the others that are cut. A value that text and SVG are made from.
struct LayoutGrid {
  std::string title;     // "[8, 6] on {dp: 2, tp: 2} as [S(0), S(1)]"
  int64_t row_dim = -1;  // -1: there is one row, or one column
  int64_t column_dim = -1;
  std::vector<Interval> rows;
  std::vector<Interval> columns;
  std::vector<LayoutSlice> slices;
  std::vector<int64_t> empty_ranks;  // ranks of the mesh that hold no element
  // Is true where cuts are too fine to be drawn; `slices` is then empty.
  bool too_fine = false;
  std::vector<std::string> tiles;  // one text per rank of the mesh: "rank 0: [0-2+4-6, 0-6]"
};

// Returns the picture of a layout; `shape` is global. Throws std::invalid_argument on a negative size, and on
// placements that do not fit the mesh or the shape.
LayoutGrid layout_grid(const std::vector<int64_t>& shape, const Mesh& mesh, const Placements& placements);

// Returns ranks as text: runs of three and more as "0..3".
std::string ranks_text(const std::vector<int64_t>& ranks);

}  // namespace tessera
