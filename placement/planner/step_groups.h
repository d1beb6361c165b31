#pragma once

#include <cstdint>

#include "tessera/placement/planner/layout_space.h"
#include "tessera/placement/planner/step_costs.h"

namespace tessera {

// Over which ranks a step is run that moves elements over `mesh_dims` (a bit for each): over those, and over the mesh
// dimensions along which copies of the elements lie where these, by sharing in the sending, leave less of it to the
// rank that sends most, at no cost. On meshes of more than 64 ranks, over `mesh_dims`.
uint32_t shared_mesh_dims(const LayoutSpace& space, const StepCosts& costs, LayoutSpace::Node from,
                          LayoutSpace::Node to, uint32_t mesh_dims);

// Whether in such a step every tile comes whole from one rank, and no rank sends to more than one. On meshes of more
// than 64 ranks it is not looked for.
bool permutes(const LayoutSpace& space, LayoutSpace::Node from, LayoutSpace::Node to, uint32_t mesh_dims);

}  // namespace tessera
