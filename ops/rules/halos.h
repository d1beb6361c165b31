#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/ops/rules/strategy.h"
#include "tessera/placement/layout.h"

// These helpers serve rules of operators whose results depend on the neighbours of an element: convolution and pooling.
// This file only computes ranges of rows; it does not communicate.
namespace tessera::rules {

// Describes the windows along one dimension: position o of the narrow side uses the positions o * stride - padding + j
// * dilation, j < kernel, of the wide side. The input of a convolution or pooling is wide and its result is narrow; for
// a transposed convolution it is the reverse.
struct Window {
  int64_t wide_size;    // the size of the wide side
  int64_t narrow_size;  // the size of the narrow side
  int64_t kernel;
  int64_t stride;
  int64_t padding;
  int64_t dilation;

  // Returns the range from the first to the last position that the windows of narrow `places` use, padding included.
  //   kernel 3, stride 2, padding 1: [0, 2) -> [-1, 4)
  Interval span(const Interval& places) const;
  // Returns the part of span(places) that lies inside the wide side.
  Interval wide_of(const Interval& places) const;
  // Returns the narrow positions whose span contains one of the wide `places`.
  Interval narrow_of(const Interval& places) const;
};

// Says which rows a rank needs from others when some dimensions of an operator with windows are cut. A rank needs the
// input rows that the windows of its result rows use, not just those of its own piece. Before the kernel runs, ranks
// exchange the missing rows of all inputs in one all_to_all over the mesh dimensions that cut `dims`.
struct Halos {
  std::vector<int64_t> dims;          // tensor dimensions, of every tensor named here
  std::vector<Window> windows;        // one per dimension in dims
  std::vector<std::size_t> inputs;    // the inputs of which rows are fetched
  bool wide = true;                   // whether these are the wide side
  std::optional<std::size_t> anchor;  // the input whose rows decide what a rank computes; nullopt: result 0

  // Returns sizes along dims[k]: of the inputs that are fetched, and of the tensor that decides what is computed.
  int64_t fetched_size(std::size_t k) const { return wide ? windows[k].wide_size : windows[k].narrow_size; }
  int64_t computed_size(std::size_t k) const { return wide ? windows[k].narrow_size : windows[k].wide_size; }
  // Returns the rows that a rank with rows `held` needs to compute the rows `computed`. A rank that holds and computes
  // all rows needs all of them.
  Interval needed(std::size_t k, const Intervals& held, const Intervals& computed) const;
  // Returns the same for tiles.
  Tile needed(Tile held, const Tile& computed) const;
};

// Returns the range from the first row to the last.
Interval hull(const Intervals& rows);

// Returns the largest share of a fetched tensor that a rank receives from others when `ranks` ranks cut it; 0 if
// nothing is sent.
double fetched_share(const Halos& halos, const Strategy& strategy, int64_t ranks);

// Adjusts a strategy in which a partition of a fixed size cuts the operator's input and its result alike: cuts the
// result by a RaggedShard in which each result row lies on the rank that holds the middle of its window. Returns false
// where the partition does not fit.
bool follow_partition(const Halos& halos, Strategy& strategy);

// Returns whether each rank computes one contiguous range of rows. The placements are those chosen for the first mesh
// dimensions.
bool computes_ranges(const Halos& halos, const Placements& fetched, const Placements& computed,
                     std::span<const int64_t> mesh_shape);

}  // namespace tessera::rules
