#include "tessera/layers/rng_tracker.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/random.h"
#include "tessera/mesh/mesh_checks.h"

namespace tessera {
namespace {

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

void set_seed(at::Generator generator, uint64_t seed) {
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

void check_is_taken(at::Generator generator, const std::string& name, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  at::Generator probe = generator.clone();
  try {
    probe.set_state(state);
  } catch (const c10::Error& error) {
    throw std::invalid_argument(
        fmt::format("RngStatesTracker::set_states: the state of \"{}\" is no state of the generator of {}: {}; give "
                    "states that get_states() returned",
                    name, generator.device().str(), error.what_without_backtrace()));
  }
}

// Adds the current device's index to a CUDA device without one.
c10::Device indexed(c10::Device device) {
  if (!device.is_cuda()) return c10::Device(device.type());
  if (device.has_index()) return device;
  const c10::DeviceIndex current = at::detail::getCUDAHooks().current_device();  // negative where there is no CUDA
  return {device.type(), std::max<c10::DeviceIndex>(current, 0)};
}

}  // namespace

at::Generator RngStatesTracker::generator() const { return at::globalContext().defaultGenerator(device_); }

void RngStatesTracker::check_not_forked(const char* who) const {
  if (!active_) return;
  throw std::logic_error(
      fmt::format("RngStatesTracker::{}: a fork draws from stream \"{}\"; end the fork first", who, *active_));
}

void RngStatesTracker::add(const std::string& name, uint64_t seed) {
  const std::lock_guard lock(mutex_);
  if (states_.contains(name)) {
    throw std::invalid_argument(fmt::format("RngStatesTracker: rng state {} already exists", name));
  }
  if (seeds_.contains(seed)) throw std::invalid_argument(fmt::format("RngStatesTracker: seed {} already exists", seed));
  const at::Tensor before = state_of(generator());
  set_seed(generator(), seed);
  at::Tensor state = state_of(generator());
  set_state(generator(), before);
  states_.emplace(name, std::move(state));
  seeds_.insert(seed);
}

RngStatesTracker::Fork RngStatesTracker::fork(const std::string& name) { return {*this, name}; }

RngStatesTracker::Fork::Fork(RngStatesTracker& tracker, const std::string& name) : tracker_(tracker), name_(name) {
  const std::lock_guard lock(tracker.mutex_);
  if (!tracker.states_.contains(name)) {
    std::vector<std::string> names;
    for (const auto& [each, state] : tracker.states_) names.push_back(each);
    throw std::invalid_argument(
        fmt::format("RngStatesTracker: rng state {} is not added; there are [{}]. Call "
                    "model_parallel_manual_seed(seed, mesh) once at the start, or add(name, seed)",
                    name, fmt::join(names, ", ")));
  }
  const at::Tensor now = state_of(tracker.generator());
  if (tracker.active_) {
    tracker.states_[*tracker.active_] = now;
  } else {
    outer_state_ = now;
  }
  set_state(tracker.generator(), tracker.states_.at(name));  // if this throws, there is no fork
  outer_name_ = std::exchange(tracker.active_, name);
}

RngStatesTracker::Fork::~Fork() {
  const std::lock_guard lock(tracker_.mutex_);
  tracker_.states_[name_] = state_of(tracker_.generator());
  set_state(tracker_.generator(), outer_name_ ? tracker_.states_.at(*outer_name_) : outer_state_);
  tracker_.active_ = std::move(outer_name_);
}

std::map<std::string, at::Tensor> RngStatesTracker::get_states() const {
  const std::lock_guard lock(mutex_);
  std::map<std::string, at::Tensor> copies;
  for (const auto& [name, state] : states_) {
    copies.emplace(name, name == active_ ? state_of(generator()) : state.clone());
  }
  return copies;
}

void RngStatesTracker::set_states(const std::map<std::string, at::Tensor>& states) {
  const std::lock_guard lock(mutex_);
  check_not_forked("set_states");
  for (const auto& [name, state] : states) check_is_taken(generator(), name, state);
  states_.clear();
  for (const auto& [name, state] : states) states_.emplace(name, state.clone());
}

RngStatesTracker::Position RngStatesTracker::position() const {
  const std::lock_guard lock(mutex_);
  return {.states = states_, .active = active_};  // a shallow copy is enough: state tensors are replaced, never written
}

void RngStatesTracker::set_position(const Position& position) {
  const std::lock_guard lock(mutex_);
  states_ = position.states;
  active_ = position.active;
}

void RngStatesTracker::reset() {
  const std::lock_guard lock(mutex_);
  check_not_forked("reset");
  states_.clear();
  seeds_.clear();
}

RngStatesTracker& rng_tracker(c10::Device device) {
  static std::mutex mutex;
  static auto* const trackers = new std::map<std::string, std::unique_ptr<RngStatesTracker>>();
  const std::lock_guard lock(mutex);
  const c10::Device of = indexed(device);
  auto& slot = (*trackers)[of.str()];
  if (!slot) slot = std::make_unique<RngStatesTracker>(of);
  return *slot;
}

void model_parallel_manual_seed(uint64_t seed, const ModelParallelSeeds& ranks) {
  if (ranks.tensor_rank < 0 || ranks.expert_rank < 0) {
    throw std::invalid_argument(
        fmt::format("model_parallel_manual_seed: tensor rank {} and expert rank {}; both are at least 0",
                    ranks.tensor_rank, ranks.expert_rank));
  }
  const c10::Device device = indexed(ranks.device);
  RngStatesTracker& tracker = rng_tracker(device);
  tracker.reset();
  set_seed(at::globalContext().defaultGenerator(device), seed);
  const auto tensor_rank = static_cast<uint64_t>(ranks.tensor_rank);
  const auto expert_rank = static_cast<uint64_t>(ranks.expert_rank);
  tracker.add(kDataParallelRng, seed);
  tracker.add(kModelParallelRng, seed + 2718 + tensor_rank);
  tracker.add(kExpertParallelRng, seed + 1024 + 100 * expert_rank + tensor_rank);
}

void model_parallel_manual_seed(uint64_t seed, const DeviceMesh& tensor_mesh,
                                const std::optional<DeviceMesh>& expert_mesh, uint64_t replica_offset) {
  for (const DeviceMesh* const mesh : {&tensor_mesh, expert_mesh ? &*expert_mesh : &tensor_mesh}) {
    check_one_dimension(*mesh, "model_parallel_manual_seed");
  }
  model_parallel_manual_seed(seed + replica_offset, {.tensor_rank = tensor_mesh.local_rank(0),
                                                     .expert_rank = expert_mesh ? expert_mesh->local_rank(0) : 0,
                                                     .device = tensor_mesh.device()});
  manual_seed(seed, tensor_mesh.world());
}

}  // namespace tessera
