#include "tessera/dtensor/route.h"

#include <mutex>
#include <unordered_map>
#include <utility>

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "tessera/dtensor/route_steps.h"
#include "tessera/mesh/check_state.h"

namespace tessera {
namespace {

// By the ids of the two Specs, which are never reused. When full, it starts anew.
class RouteCache {
 public:
  static constexpr std::size_t kMost = 1024;

  RoutePtr find(uint64_t from, uint64_t to) {
    const std::lock_guard lock(mutex_);
    const auto found = routes_.find({from, to});
    return found == routes_.end() ? nullptr : found->second;
  }
  void insert(uint64_t from, uint64_t to, RoutePtr route) {
    const std::lock_guard lock(mutex_);
    if (routes_.size() >= kMost) routes_.clear();
    routes_.emplace(Key{from, to}, std::move(route));
  }

 private:
  using Key = std::pair<uint64_t, uint64_t>;
  struct Hash {
    std::size_t operator()(const Key& key) const { return (key.first * 0x9e3779b97f4a7c15ULL) ^ key.second; }
  };
  std::mutex mutex_;
  std::unordered_map<Key, RoutePtr, Hash> routes_;
};

RouteCache& cache() {
  static auto* const instance = new RouteCache();  // tensors may outlive static destruction
  return *instance;
}

// What a mesh's links cost when nobody said. A rank of a CUDA mesh is one of a host's GPUs.
CostModel default_model(const DeviceMesh& mesh) {
  if (mesh.device_type() == c10::DeviceType::CUDA) {
    return CostModel::nvlink_infiniband(mesh.mesh(), mesh.world().local_size());
  }
  return CostModel::gloo(mesh.ndim());
}

}  // namespace

Route::Route(const Spec& from, const Spec& to)
    : plan_(plan_redistribute(from.sizes, from.dtype, from.mesh.mesh(), from.placements, to.placements,
                              default_model(from.mesh))),
      communicates_(plan_.communicates()),
      member_(from.mesh.is_member()) {
  if (!member_) return;
  for (const PlanStep& step : plan_.steps()) steps_.push_back(make_step(step, plan_, from.mesh));
}

Route::~Route() = default;

at::Tensor Route::run(const DeviceMesh& mesh, const at::Tensor& local) const {
  if (!member_) return at::empty({0}, local.options());
  at::Tensor piece = local;
  CheckState& checks = mesh.world().check_state();
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const PlanStep& step = plan_.steps()[i];
    const CheckedStep named(checks, checks.enabled ? fmt::format("{} -> {}", to_string(step.from), to_string(step.to)) : "");
    piece = steps_[i]->run(mesh, piece);
  }
  return piece;
}

RoutePtr route_between(const Spec& from, const Spec& to) {
  if (RoutePtr found = cache().find(from.id, to.id)) return found;
  auto made = std::make_shared<const Route>(from, to);
  cache().insert(from.id, to.id, made);
  return made;
}

at::Tensor redistribute_local(const at::Tensor& local, const Spec& from, const Placements& to) {
  const SpecPtr target = with_placements(from, to);
  return route_between(from, *target)->run(from.mesh, local);
}

}  // namespace tessera
