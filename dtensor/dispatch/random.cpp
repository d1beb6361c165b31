#include "tessera/dtensor/dispatch/random.h"

#include <mutex>

#include <ATen/Context.h>
#include <ATen/ops/empty.h>

namespace tessera {
namespace {

// One round of splitmix64: neighbouring keys give unrelated generators. Source: Steele, Lea, Flood (OOPSLA 2014).
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

uint64_t key_from(at::Generator user) {
  const at::Tensor word = at::empty({}, at::TensorOptions(at::kLong).device(user.device()));
  word.random_(user);
  return static_cast<uint64_t>(word.item<int64_t>());
}

// Held by who draws: LibTorch's default generators are the process's, and several ranks may be its threads.
std::recursive_mutex& drawing() {
  static std::recursive_mutex mutex;
  return mutex;
}

at::Generator default_generator(const c10::Device& device) { return at::globalContext().defaultGenerator(device); }

}  // namespace

namespace detail {

std::vector<int64_t> draw_coordinate(const DeviceMesh& mesh, const Placements& placements) {
  std::vector<int64_t> out;
  if (!mesh.is_member()) return out;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    out.push_back(placements[i].is_shard() ? (*mesh.coordinate())[i] : -1);
  }
  return out;
}

DrawGuard::DrawGuard(const DeviceMesh& mesh, const std::vector<int64_t>& coordinate,
                     const std::optional<at::Generator>& user)
    : drawing_(drawing()), generator_(default_generator(mesh.device())) {
  RandomState& state = mesh.world().random_state();
  uint64_t key = user && user->defined() ? mix(key_from(*user)) : mix(mix(state.seed) ^ state.counter++);
  for (const int64_t c : coordinate) key = mix(key ^ static_cast<uint64_t>(c + 1));
  const std::lock_guard lock(generator_.mutex());
  saved_ = generator_.get_state();
  generator_.set_current_seed(key);
}

DrawGuard::~DrawGuard() {
  const std::lock_guard lock(generator_.mutex());
  generator_.set_state(saved_);
}

}  // namespace detail
}  // namespace tessera
