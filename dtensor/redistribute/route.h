#pragma once

#include <cstddef>
#include <memory>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/redistribute/local_step.h"
#include "tessera/dtensor/redistribute/transfer.h"
#include "tessera/placement/plan.h"
#include "tessera/placement/planner/cost_model.h"

namespace tessera {

// Holds a plan prepared for this rank: what it packs, sends, receives and unpacks in each step. RouteExecution executes
// it. It is immutable, made once per pair of layouts and cached. It does not keep the mesh alive.
class Route {
 public:
  // Prepares `plan`, which leads from the layout `from` to another one on the same mesh.
  Route(const Spec& from, Plan plan);

  const Plan& plan() const { return plan_; }
  bool communicates() const { return communicates_; }

  // Executes the steps from `step` on up to the next one that communicates, and advances `step` to that one. `mesh` is
  // the one that the route was made for; the piece may have any strides. Outside the mesh it returns an empty tensor.
  at::Tensor run_local_steps(const DeviceMesh& mesh, std::size_t& step, at::Tensor piece) const;
  // Returns the transfer of `step`, to which run_local_steps() has advanced; nullptr at the end.
  const Transfer* transfer(std::size_t step) const;

 private:
  Plan plan_;
  bool communicates_ = false;
  bool member_ = false;
  std::vector<std::variant<LocalStep, Transfer>> steps_;
};
using RoutePtr = std::shared_ptr<const Route>;

// Returns the route between two layouts of one tensor, from a cache or newly made. The cache compares layouts by value,
// since Specs live only as long as their tensors, and keeps at most 1,024 recently used routes. Plans are compared by
// `model`; without links, by default_cost_model.
RoutePtr route_between(const Spec& from, const Placements& to, const CostModel& model = {});
// Returns CostModel::nvlink_infiniband on CUDA, with as many ranks per host as rank 0's host has; else CostModel::gloo.
CostModel default_cost_model(const DeviceMesh& mesh);

}  // namespace tessera
