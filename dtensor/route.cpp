#include "tessera/dtensor/route.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "tessera/mesh/check_state.h"

namespace tessera {
namespace {

// By the ids of the two Specs, which are never reused, and the cost model. When full, it starts anew.
class RouteCache {
 public:
  static constexpr std::size_t kMost = 1024;

  RoutePtr find(uint64_t from, uint64_t to, const CostModel& model) {
    const std::lock_guard lock(mutex_);
    const auto found = routes_.find(key(from, to, model));
    return found == routes_.end() || found->second.model != model ? nullptr : found->second.route;
  }
  void insert(uint64_t from, uint64_t to, const CostModel& model, RoutePtr route) {
    const std::lock_guard lock(mutex_);
    if (routes_.size() >= kMost) routes_.clear();
    routes_.insert_or_assign(key(from, to, model), Entry{model, std::move(route)});
  }

 private:
  struct Key {
    uint64_t from, to, model;
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const { return ((key.from * kMix) ^ key.to) * kMix ^ key.model; }
  };
  struct Entry {
    CostModel model;
    RoutePtr route;
  };
  static constexpr uint64_t kMix = 0x9e3779b97f4a7c15ULL;
  static Key key(uint64_t from, uint64_t to, const CostModel& model) {
    uint64_t hash = 0;
    for (const Link& link : model.links) {
      hash = (hash * kMix ^ std::bit_cast<uint64_t>(link.microseconds)) * kMix ^
             std::bit_cast<uint64_t>(link.bytes_per_microsecond);
    }
    return {from, to, hash};
  }

  std::mutex mutex_;
  std::unordered_map<Key, Entry, Hash> routes_;
};

RouteCache& cache() {
  static auto* const instance = new RouteCache();  // tensors may outlive static destruction
  return *instance;
}

std::variant<LocalStep, Transfer> make_step(const Place& at) {
  if (at.step.kind == PlanStep::Kind::kLocal) return LocalStep(at);
  return Transfer(at);
}

// The last plans of this process. Ranks that are threads want the same one at about the same time: the first of them makes it.
class RecentPlans {
 public:
  Plan find_or_make(const Spec& from, const Spec& to, const CostModel& model) {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find_if(made_, [&](const Made& made) {
      return made.from == from.placements && made.to == to.placements && made.plan.shape() == from.sizes &&
             made.plan.dtype() == from.dtype && made.plan.mesh() == from.mesh.mesh() && made.model == model;
    });
    if (found != made_.end()) return found->plan;
    if (made_.size() == kMost) made_.pop_front();
    const Plan plan = plan_redistribute(from.sizes, from.dtype, from.mesh.mesh(), from.placements, to.placements, model);
    made_.push_back({.from = from.placements, .to = to.placements, .model = model, .plan = plan});
    return plan;
  }

 private:
  static constexpr std::size_t kMost = 16;
  struct Made {
    Placements from;
    Placements to;
    CostModel model;
    Plan plan;
  };
  std::mutex mutex_;
  std::deque<Made> made_;
};

RecentPlans& recent_plans() {
  static auto* const instance = new RecentPlans();  // as cache()
  return *instance;
}

}  // namespace

Route::Route(const Spec& from, Plan plan)
    : plan_(std::move(plan)), communicates_(plan_.communicates()), member_(from.mesh.is_member()) {
  if (!member_) return;
  for (const PlanStep& step : plan_.steps()) steps_.push_back(make_step(Place(step, plan_, from.mesh)));
}

at::Tensor Route::walk(std::size_t& step, at::Tensor piece) const {
  if (!member_) return at::empty({0}, piece.options());
  for (; step < steps_.size(); ++step) {
    const auto* const local = std::get_if<LocalStep>(&steps_[step]);
    if (local == nullptr) break;
    piece = local->run(piece);
  }
  return piece;
}

const Transfer* Route::transfer(std::size_t step) const {
  return step < steps_.size() ? std::get_if<Transfer>(&steps_[step]) : nullptr;
}

at::Tensor Route::run(const DeviceMesh& mesh, const at::Tensor& local) const {
  std::size_t step = 0;
  at::Tensor piece = walk(step, local);
  CheckState& checks = mesh.world().check_state();
  while (const Transfer* const next = transfer(step)) {
    const PlanStep& planned = plan_.steps()[step];
    const CheckedStep named(checks,
                            checks.enabled ? fmt::format("{} -> {}", to_string(planned.from), to_string(planned.to)) : "");
    at::Tensor load = next->loaded(piece);
    piece.reset();
    const at::Tensor kept = next->keeps_load() ? load : at::Tensor();
    piece = next->result(next->start(mesh, std::move(load)).wait(), kept);
    piece = walk(++step, std::move(piece));
  }
  return piece;
}

CostModel default_cost_model(const DeviceMesh& mesh) {
  if (mesh.device_type() == c10::DeviceType::CUDA) {
    return CostModel::nvlink_infiniband(mesh.mesh(), mesh.world().local_size());
  }
  return CostModel::gloo(mesh.ndim());
}

RoutePtr route_between(const Spec& from, const Spec& to, const CostModel& model) {
  if (RoutePtr found = cache().find(from.id, to.id, model)) return found;
  const CostModel costs = model.links.empty() ? default_cost_model(from.mesh) : model;
  RoutePtr made = std::make_shared<const Route>(from, recent_plans().find_or_make(from, to, costs));
  cache().insert(from.id, to.id, model, made);
  return made;
}

at::Tensor redistribute_local(const at::Tensor& local, const Spec& from, const Placements& to) {
  const SpecPtr target = with_placements(from, to);
  return route_between(from, *target)->run(from.mesh, local);
}

}  // namespace tessera
