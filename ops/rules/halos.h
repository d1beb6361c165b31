#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/ops/rules/strategy.h"
#include "tessera/placement/layout.h"

// Operators that look at the neighbours of elements: convolution and pooling. Arithmetic alone.
namespace tessera::rules {

// How windows lie along one dimension: place o of the narrow side meets the places o * stride - padding + j * dilation,
// j < kernel, of the wide one. What is convolved or pooled is wide and the result narrow; of a transposed convolution
// the reverse.
struct Window {
  int64_t wide;  // sizes
  int64_t narrow;
  int64_t kernel;
  int64_t stride;
  int64_t padding;
  int64_t dilation;

  // From the first place that windows of narrow `places` meet to the last, beyond the edges too.
  //   kernel 3, stride 2, padding 1: [0, 2) -> [-1, 4)
  Interval span(const Interval& places) const;
  // What of that there is.
  Interval wide_of(const Interval& places) const;
  // The narrow places whose span holds one of the wide `places`.
  Interval narrow_of(const Interval& places) const;
};

// What a rank computes from where some dimensions are cut: not its own rows of an input, but those that the rows which
// it computes meet. Ranks exchange the rest before the kernel runs: all inputs in one all_to_all over the mesh
// dimensions that cut `dims`.
struct Halos {
  std::vector<int64_t> dims;          // tensor dimensions, of every tensor named here
  std::vector<Window> windows;        // one each
  std::vector<std::size_t> inputs;    // that are fetched
  bool wide = true;                   // they are the wide side
  std::optional<std::size_t> anchor;  // the input whose rows are computed for; none: result 0

  // Along dims[k]: sizes of what is fetched and of what is computed.
  int64_t fetched_size(std::size_t k) const { return wide ? windows[k].wide : windows[k].narrow; }
  int64_t computed_size(std::size_t k) const { return wide ? windows[k].narrow : windows[k].wide; }
  // The rows to have for `computed` ones by a rank that holds `held`. One that holds and computes all keeps all.
  Interval needed(std::size_t k, const Intervals& held, const Intervals& computed) const;
  // The same of tiles.
  Tile needed(Tile held, const Tile& computed) const;
};

// The rows from the first to the last.
Interval hull(const Intervals& rows);

// Of what is fetched, the share that a rank gets from others at most, where `ranks` cut it; 0: nobody gets anything.
double fetched_share(const Halos& halos, const Strategy& strategy, int64_t ranks);

// For a strategy in which a partition of a fixed size cuts what the operator is given and what it gives alike: makes
// the latter's a RaggedShard by which each result lies where the middle of its window does. False where the partition
// does not fit.
bool follow_partition(const Halos& halos, Strategy& strategy);

// Whether each rank computes one range of rows, of placements chosen for the first mesh dimensions.
bool computes_ranges(const Halos& halos, const Placements& fetched, const Placements& computed,
                     std::span<const int64_t> mesh_shape);

}  // namespace tessera::rules
