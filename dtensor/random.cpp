#include "tessera/dtensor/random.h"

#include <stdexcept>

#include <ATen/ops/zeros.h>
#include <fmt/format.h>

namespace tessera {

void manual_seed(uint64_t seed, World& world) { world.random_state() = {.seed = seed, .counter = 0}; }
void manual_seed(uint64_t seed, const DeviceMesh& mesh) { manual_seed(seed, mesh.world()); }

CapturedDraws::CapturedDraws(World& world, c10::Device device) : world_(world), before_(world.random_state()) {
  if (!device.is_cuda()) {
    throw std::invalid_argument(fmt::format("CapturedDraws: the device is {}; a CUDA graph needs a GPU", device.str()));
  }
  if (before_.base != nullptr) {
    throw std::logic_error("CapturedDraws: the world records the draws of another graph; call end() of that one first");
  }
  base_ = at::zeros({}, at::TensorOptions(at::kLong).device(device));
  world.random_state() = {
      .seed = before_.seed, .counter = 0, .base = reinterpret_cast<const uint64_t*>(base_.const_data_ptr<int64_t>())};
}

CapturedDraws::~CapturedDraws() { end(); }

void CapturedDraws::end() {
  if (!records_) return;
  records_ = false;
  const RandomState recorded = world_.random_state();
  world_.random_state() = before_;
  count_ = recorded.base == nullptr ? 0 : recorded.counter;
  was_seeded_ = recorded.base == nullptr || recorded.seed != before_.seed;
}

void CapturedDraws::before_replay() {
  if (records_) throw std::logic_error("CapturedDraws: before_replay() while draws are recorded; call end() first");
  RandomState& state = world_.random_state();
  if (state.base != nullptr) {
    throw std::logic_error(
        "CapturedDraws: before_replay() while the world records the draws of another graph; call end() of that one "
        "first");
  }
  if (was_seeded_ || state.seed != before_.seed) {
    throw std::logic_error(
        fmt::format("CapturedDraws: the graph draws from the seed {}, {}; capture the step again after manual_seed or "
                    "load_training_state",
                    before_.seed,
                    was_seeded_ ? "and another one was set while it was recorded"
                                : fmt::format("and the world's is {} now", state.seed)));
  }
  base_.fill_(static_cast<int64_t>(state.counter));
  state.counter += count_;
}

}  // namespace tessera
