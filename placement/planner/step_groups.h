#pragma once

#include <cstdint>

#include "tessera/placement/planner/layout_space.h"
#include "tessera/placement/planner/step_costs.h"

namespace tessera {

// Returns the mesh dimensions over which to run a step that moves elements over `mesh_dims` (a bit for each). These are
// `mesh_dims` and those mesh dimensions along which copies of the elements lie, if sharing the sends among the copies
// reduces the bytes sent by the rank that sends most, at no cost. On meshes of more than 64 ranks it returns
// `mesh_dims`.
uint32_t shared_mesh_dims(const LayoutSpace& space, const StepCosts& costs, LayoutSpace::Node from,
                          LayoutSpace::Node to, uint32_t mesh_dims);

// Says whether in such a step each rank receives its tile whole from one rank and sends to at most one. On meshes of
// more than 64 ranks it returns false.
bool permutes(const LayoutSpace& space, LayoutSpace::Node from, LayoutSpace::Node to, uint32_t mesh_dims);

}  // namespace tessera
