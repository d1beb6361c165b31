#pragma once

#include <cstdint>
#include <vector>

#include <c10/core/ScalarType.h>

#include "tessera/mesh/mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/placement/plan.h"
#include "tessera/placement/planner/cost_model.h"

namespace tessera {

// Returns the cheapest plan under `model` (CostModel::gloo when it has no links) that redistributes a tensor of `shape`
// from `from` to `to`: no other sequence of these steps takes less time.
//   local                             slicing; forming a Partial of a whole value or of a Shard's piece; one linear
//                                     reduction as another (sum as avg)
//   all_gather, all_to_all, permute   any change between Replicate and Shards, over the fewest mesh dimensions along
//                                     which every rank finds what it needs
//   all_reduce, reduce_scatter        pending reductions of one kind over one or several mesh dimensions, into any
//                                     layout of which every rank has its own terms. Where tiles are too uneven to be
//                                     scattered, an all_reduce of everything that the group needs
// Intermediate layouts are those of LayoutSpace: each mesh dimension has its placement in `from` or `to`, Replicate or
// torch.chunk's Shard, and may cut in any order. Live bytes are at most those of the source tile, the target tile and
// twice the larger of the two, unless there is no such plan. With equal links and without a pending reduction the plan
// is one step in which no rank receives an element that it has, which is the lower bound.
//
// A masked reduction counts as the reduction without its mask (Reduction::unmasked). If there are too many layouts
// (possible on meshes of five dimensions and more), the intermediate ones keep the mesh's order of cuts, or use only
// placements of `from` and `to` and Replicate. At most four tensor dimensions are cut that neither `from` nor `to`
// cuts.
//
// On meshes of more than 64 ranks the search compares only some ranks. The figures of the plan are those of all ranks.
// Where cuts are uneven on such a mesh, or links differ and a size of the mesh is no power of two, a step may cost more
// or less, or have more bytes live, than the search saw, so that a cheaper plan is missed; and no step is a permute.
//
// Throws std::invalid_argument on an invalid shape, and on placements that do not fit the mesh, the shape or the dtype.
Plan plan_redistribute(const std::vector<int64_t>& shape, at::ScalarType dtype, const Mesh& mesh,
                       const Placements& from, const Placements& to, const CostModel& model = {});

// Returns a lower bound on the bytes of any redistribution from `from` to `to`: max_bytes are received by the rank that
// needs most, total_bytes by all ranks together.
//   Without pending reductions: the elements of a rank's target tile that it does not hold.
//   With pending reductions: the terms of each element that must be added up or sent (see docs/redistribution.md).
// Throws std::invalid_argument on placements that do not fit the mesh or the shape.
struct LowerBound {
  int64_t max_bytes = 0;
  int64_t total_bytes = 0;
};
LowerBound lower_bound(const std::vector<int64_t>& shape, at::ScalarType dtype, const Mesh& mesh,
                       const Placements& from, const Placements& to);

}  // namespace tessera
