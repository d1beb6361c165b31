#pragma once

#include <cstdint>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/exchange.h"
#include "tessera/placement/plan.h"

namespace tessera {

// Describes one step of a plan from the view of this rank, a member of the mesh. Holds references to the plan and the
// mesh.
struct StepOnRank {
  StepOnRank(const PlanStep& plan_step, const Plan& plan, const DeviceMesh& device_mesh)
      : step(plan_step),
        shape(plan.shape()),
        dtype(plan.dtype()),
        mesh_shape(device_mesh.mesh().shape()),
        coordinate(*device_mesh.coordinate()),
        group(mesh_shape, step.mesh_dims) {}

  const PlanStep& step;
  const std::vector<int64_t>& shape;
  const at::ScalarType dtype;
  const std::vector<int64_t>& mesh_shape;
  const std::vector<int64_t>& coordinate;
  const MergedDims group;

  Tile source() const { return local_tile(shape, step.from, mesh_shape, coordinate); }
  Tile target() const { return local_tile(shape, step.to, mesh_shape, coordinate); }
  // Return the tiles of another member of the group.
  Tile source_of(int64_t member) const {
    return local_tile(shape, step.from, mesh_shape, group.coordinate_of(coordinate, member));
  }
  Tile target_of(int64_t member) const {
    return local_tile(shape, step.to, mesh_shape, group.coordinate_of(coordinate, member));
  }
};

}  // namespace tessera
