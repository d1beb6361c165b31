#pragma once

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/planner/cost_model.h"

namespace tessera {

// The cost model of a mesh as it is: on each mesh dimension of more than one rank, in turn, all-to-alls of 1 KiB to 4
// MiB a rank are timed (9 of each after 3, in turns; of the slowest rank's times the least), and a latency and a
// bandwidth are fitted. Takes some tenths of a second, and up to 8 times as long while the most bytes do not take the
// longest, as on a loaded machine. Collective over the mesh, and the same on every rank:
//
//   const tessera::CostModel costs = tessera::measured_costs(mesh);
//   redistribute(t, {Shard(1)}, {.cost_model = costs});
//
// Throws std::invalid_argument outside the mesh, on a fake world, where nothing travels, and when times do not grow
// with the bytes (CostModel::fitted); std::runtime_error when the group fails.
CostModel measured_costs(const DeviceMesh& mesh);

}  // namespace tessera
