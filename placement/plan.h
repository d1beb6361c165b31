#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/placement/placement.h"

namespace tessera {

// One change of one mesh dimension's placement. What runs follows from the pair:
//   R -> S  slice, no communication            S -> R  all_gather        S -> S'  all_to_all
//   P -> R  all_reduce                         P -> S  reduce_scatter
//   R -> P  no communication: the value stays at coordinate 0, the others hold the reduction's neutral element (avg: the
//           value everywhere)
struct PlanStep {
  int64_t mesh_dim = 0;
  Placement from;
  Placement to;
  friend bool operator==(const PlanStep&, const PlanStep&) = default;
};

// "all_gather" ... as CommCounter names them; "slice" and "to_partial" for the steps that do not communicate.
const char* step_name(const PlanStep& step);
bool communicates(const PlanStep& step);

// The steps from one layout to another, in order. Symbolic: the same on every rank.
using Plan = std::vector<PlanStep>;
std::string to_string(const Plan& plan, const std::vector<std::string>& mesh_dim_names = {});
bool communicates(const Plan& plan);

// Plans `from` -> `to` (normalized) on a mesh of `mesh_shape`, for a tensor of any shape: mesh dimensions of size 1 change
// without a step. A mesh dimension is changed directly unless the mesh dimensions outside it shard its target's tensor
// dimension otherwise than in the target; then it is gathered first, because chunks nest in the order of mesh dimensions.
// One Partial becomes another, and a Shard a Partial, through Replicate.
// Source of the two passes: PyTorch's greedy DTensor planner.
Plan plan_redistribute(const Placements& from, const Placements& to, std::span<const int64_t> mesh_shape);

// A rough time in microseconds for one step on a piece of `bytes` (the tensor as this step finds it, whole along its mesh
// dimension) over `ranks`: 0 for what does not communicate. For comparing an operator's choices.
double estimated_microseconds(const PlanStep& step, double bytes, int64_t ranks);

}  // namespace tessera
