#include "tessera/dtensor/redistribute/route.h"

#include <algorithm>
#include <bit>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/hash.h>

#include "tessera/dtensor/redistribute/recent_cache.h"
#include "tessera/mesh/failing.h"
#include "tessera/placement/planner/plan_redistribute.h"

namespace tessera {
namespace {

// Identifies a route: everything that it depends on.
struct RouteKey {
  RouteKey(const Spec& spec, const Placements& placements, const CostModel& cost_model)
      : mesh(spec.mesh.id()),
        dtype(spec.dtype),
        sizes(spec.sizes),
        from(spec.placements),
        to(placements),
        model(cost_model) {}

  std::size_t hash() const {
    std::size_t seed = mesh;
    seed = c10::hash_combine(seed, static_cast<std::size_t>(dtype));
    for (const int64_t size : sizes) seed = c10::hash_combine(seed, static_cast<std::size_t>(size));
    for (const Placement& each : from) seed = c10::hash_combine(seed, each.hash());
    for (const Placement& each : to) seed = c10::hash_combine(seed, each.hash());
    for (const Link& link : model.links) {
      seed = c10::hash_combine(seed, std::bit_cast<uint64_t>(link.microseconds));
      seed = c10::hash_combine(seed, std::bit_cast<uint64_t>(link.bytes_per_microsecond));
    }
    return seed;
  }

  const uint64_t mesh;
  const at::ScalarType dtype;
  const std::vector<int64_t>& sizes;
  const Placements& from;
  const Placements& to;
  const CostModel& model;
};

// Is what a cached route is found by; its plan holds the dtype and the sizes.
struct KeptKey {
  explicit KeptKey(const RouteKey& key) : mesh(key.mesh), from(key.from), to(key.to), model(key.model) {}

  bool is(const RouteKey& key, const Route& route) const {
    return mesh == key.mesh && route.plan().dtype() == key.dtype && route.plan().shape() == key.sizes &&
           from == key.from && to == key.to && model == key.model;
  }

  uint64_t mesh;
  Placements from;
  Placements to;
  CostModel model;
};

RecentCache<KeptKey, Route>& cache() {
  static auto* const instance = new RecentCache<KeptKey, Route>(1024);  // tensors may outlive static destruction
  return *instance;
}

// Checks that a user's reduction forms pieces that reduce to the value, where this step makes one pending.
void check_formed(const PlanStep& step, at::ScalarType dtype) {
  for (std::size_t i = 0; i < step.to.size(); ++i) {
    const Placement& to = step.to[i];
    if (to == step.from[i] || !to.is_partial() || step.from[i].is_partial()) continue;
    const bool plain = to.reduction_ptr() == plain_reduction(to.reduction().op()) || to.is_partial(ReduceOp::kAvg);
    const bool nested = std::ranges::count(step.to, to) > 1;
    if (!plain) check_spread(to.reduction(), dtype, "redistribute", nested);
  }
}

std::variant<LocalStep, Transfer> make_step(const StepOnRank& at) {
  if (at.step.kind == PlanStep::Kind::kLocal) return LocalStep(at);
  return Transfer(at);
}

RoutePtr make_route(const Spec& from, const Placements& to, const CostModel& model) {
  Plan plan = plan_redistribute(from.sizes, from.dtype, from.mesh.mesh(), from.placements, to, model);
  for (const PlanStep& step : plan.steps()) check_formed(step, from.dtype);
  return std::make_shared<const Route>(from, std::move(plan));
}

}  // namespace

Route::Route(const Spec& from, Plan plan)
    : plan_(std::move(plan)), communicates_(plan_.communicates()), member_(from.mesh.is_member()) {
  if (!member_) return;
  for (const PlanStep& step : plan_.steps()) steps_.push_back(make_step(StepOnRank(step, plan_, from.mesh)));
}

at::Tensor Route::run_local_steps(const DeviceMesh& mesh, std::size_t& step, at::Tensor piece) const {
  if (!member_) return at::empty({0}, piece.options());
  for (; step < steps_.size(); ++step) {
    const auto* const local = std::get_if<LocalStep>(&steps_[step]);
    if (local == nullptr) break;
    piece = failing(mesh.world(), "redistribute", [&] { return local->run(piece); });
  }
  return piece;
}

const Transfer* Route::transfer(std::size_t step) const {
  return step < steps_.size() ? std::get_if<Transfer>(&steps_[step]) : nullptr;
}

CostModel default_cost_model(const DeviceMesh& mesh) {
  if (mesh.device_type() == c10::DeviceType::CUDA) {
    return CostModel::nvlink_infiniband(mesh.mesh(), mesh.world().ranks_per_host());
  }
  return CostModel::gloo(mesh.ndim());
}

RoutePtr route_between(const Spec& from, const Placements& to, const CostModel& model) {
  const RouteKey key(from, to, model);
  const std::size_t hash = key.hash();
  const auto is_it = [&](const KeptKey& kept, const Route& route) { return kept.is(key, route); };
  if (RoutePtr found = cache().find(hash, is_it)) return found;
  RoutePtr made = make_route(from, to, model.links.empty() ? default_cost_model(from.mesh) : model);
  cache().insert(hash, KeptKey(key), made);
  return made;
}

}  // namespace tessera
