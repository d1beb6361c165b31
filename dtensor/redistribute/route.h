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

// A plan made ready for this rank: what it packs, sends, receives and unpacks in each step. Immutable; made once for
// two layouts and kept. It does not keep the mesh.
class Route {
 public:
  // From one layout of a tensor to another on the same mesh, by `plan` between the two.
  Route(const Spec& from, Plan plan);

  const Plan& plan() const { return plan_; }
  bool communicates() const { return communicates_; }

  // Carries out the plan on this rank's piece on the mesh that it was made for; every rank of it must. The result may
  // share storage with `local`, which is never written. No autograd. Outside the mesh: an empty tensor, no
  // communication.
  at::Tensor run(const DeviceMesh& mesh, const at::Tensor& local) const;

  // The same in parts. Carries out what needs no communication from `step` on, which it advances; the piece may be of
  // any strides.
  at::Tensor walk(const DeviceMesh& mesh, std::size_t& step, at::Tensor piece) const;
  // What is to be moved in `step`, where walk() has come to; null at the end.
  const Transfer* transfer(std::size_t step) const;

 private:
  Plan plan_;
  bool communicates_ = false;
  bool member_ = false;
  std::vector<std::variant<LocalStep, Transfer>> steps_;
};
using RoutePtr = std::shared_ptr<const Route>;

// The route between two layouts of one tensor, made, or found by what they are: Specs come and go with their tensors.
// At most 1,024 are kept, those used of late. `model` is what plans are compared by; without links, default_cost_model.
RoutePtr route_between(const Spec& from, const Placements& to, const CostModel& model = {});
// CostModel::nvlink_infiniband on CUDA, hosts having as many ranks as rank 0's; else CostModel::gloo.
CostModel default_cost_model(const DeviceMesh& mesh);

// Runs the route from `from` to `to`.
at::Tensor redistribute_local(const at::Tensor& local, const Spec& from, const Placements& to);

}  // namespace tessera
