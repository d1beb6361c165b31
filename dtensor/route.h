#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/spec.h"
#include "tessera/placement/plan.h"

namespace tessera {

// A plan made ready for this rank: what it packs, sends, receives and unpacks in each step. Immutable; made once for two layouts
// and kept. It does not keep the mesh.
class Route {
 public:
  // From one layout of a tensor to another on the same mesh.
  Route(const Spec& from, const Spec& to);
  ~Route();
  Route(const Route&) = delete;
  Route& operator=(const Route&) = delete;

  const Plan& plan() const { return plan_; }
  bool communicates() const { return communicates_; }

  // Carries out the plan on this rank's piece on the mesh that it was made for; every rank of it must. The result is row-major
  // and may share storage with `local`, which is never written. No autograd. Outside the mesh: an empty tensor, no communication.
  at::Tensor run(const DeviceMesh& mesh, const at::Tensor& local) const;

  // One step of it. Pieces of any strides go in.
  class Step {
   public:
    virtual ~Step() = default;
    virtual at::Tensor run(const DeviceMesh& mesh, const at::Tensor& piece) const = 0;
  };

 private:
  Plan plan_;
  bool communicates_ = false;
  bool member_ = false;
  std::vector<std::unique_ptr<const Step>> steps_;
};
using RoutePtr = std::shared_ptr<const Route>;

// The route between two layouts of one tensor, made or found. At most a thousand are kept.
RoutePtr route_between(const Spec& from, const Spec& to);

// Runs the route from `from` to `to`.
at::Tensor redistribute_local(const at::Tensor& local, const Spec& from, const Placements& to);

}  // namespace tessera
