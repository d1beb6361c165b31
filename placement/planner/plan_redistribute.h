#pragma once

#include <cstdint>
#include <vector>

#include <c10/core/ScalarType.h>

#include "tessera/mesh/mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/placement/plan.h"
#include "tessera/placement/planner/cost_model.h"

namespace tessera {

// The cheapest plan under `model` (CostModel::gloo when it has no links) from `from` to `to` for a tensor of `shape`:
// one that no other sequence of steps undercuts, a step being
//   local                                     slicing, forming a Partial of a whole value or of a Shard's piece, one
//                                             linear reduction as another (sum as avg)
//   all_gather, all_to_all, permute           any change between Replicate and Shards, over the fewest mesh dimensions
//                                             along which every rank finds what it lacks
//   all_reduce, reduce_scatter                of pending reductions of one kind over one or several mesh dimensions,
//                                             into any layout of which every rank has its own terms; an all_reduce of
//                                             all that its group needs, where tiles are too uneven to be scattered
// and a layout on the way one of LayoutSpace: each mesh dimension with its placement in `from` or `to`, Replicate or
// torch.chunk's Shard, cutting in any order. Live bytes are at most the source's and the target's tile and twice the
// larger of the two, unless there is no such plan. Without a pending reduction and with equal links it is one step in
// which no rank receives an element that it has: the lower bound.
//
// A masked reduction counts as the one that it awaits. Where layouts are too many (of five mesh dimensions and more),
// those on the way keep the mesh's order of cuts, or only the ends' placements; and at most four tensor dimensions are
// cut that neither end cuts. On meshes of more than 64 ranks the search compares some ranks; the figures are those of
// all, and where these say more than the search saw, it is repeated with all (milliseconds to seconds, on thousands of
// ranks cut unevenly by interval lists or sizes). Where cuts are uneven there, a step may cost less than was seen, and
// a plan with it be cheaper than the one found; and no step is a permute. Throws std::invalid_argument on a shape that
// is none, and on placements that do not fit the mesh, the shape or the dtype.
Plan plan_redistribute(const std::vector<int64_t>& shape, at::ScalarType dtype, const Mesh& mesh,
                       const Placements& from, const Placements& to, const CostModel& model = {});

// Bytes that no redistribution from `from` to `to` can save, received by the rank that needs most and by all together:
//   without pending reductions, of the elements of its target tile those that a rank does not hold;
//   with them, from the terms of an element that must meet or be sent (see docs/redistribution.md).
// Throws std::invalid_argument on placements that do not fit the mesh or the shape.
struct LowerBound {
  int64_t max_bytes = 0;
  int64_t total_bytes = 0;
};
LowerBound lower_bound(const std::vector<int64_t>& shape, at::ScalarType dtype, const Mesh& mesh,
                       const Placements& from, const Placements& to);

}  // namespace tessera
