#pragma once

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/planner/cost_model.h"

namespace tessera {

// Measures the cost model of a mesh. On each mesh dimension of more than one rank, one after the other, it times
// all-to-alls in which a rank sends 1 KiB to 4 MiB (9 of each size after 3 warm-ups, in turns; the least of the slowest
// rank's times counts), and fits a latency and a bandwidth. It takes some tenths of a second, and up to 8 times as long
// while the largest size does not take the longest, as on a loaded machine. Every rank of the mesh must call it;
// the result is the same on every rank:
//
//   const tessera::CostModel costs = tessera::measured_costs(mesh);
//   redistribute(t, {Shard(1)}, {.cost_model = costs});
//
// Throws std::invalid_argument outside the mesh, in a fake world, which sends nothing, and when the times do not grow
// with the bytes (CostModel::fitted); std::runtime_error when the group fails.
CostModel measured_costs(const DeviceMesh& mesh);

}  // namespace tessera
