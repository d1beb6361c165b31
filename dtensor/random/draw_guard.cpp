#include "tessera/dtensor/random/draw_guard.h"

#include <ATen/Context.h>

namespace tessera::detail {
namespace {

// Is locked while a rank draws: LibTorch's default generators belong to the process, and several ranks may be its
// threads.
std::recursive_mutex& drawing() {
  static std::recursive_mutex mutex;
  return mutex;
}

}  // namespace

at::Generator generator_of(const c10::Device& device, DrawKey key) {
  at::Generator usual = at::globalContext().defaultGenerator(device);
  at::Generator own = [&] {
    const std::lock_guard lock(usual.mutex());
    return usual.clone();
  }();
  own.set_current_seed(seed_of(key));
  return own;
}

DrawGuard::DrawGuard(const c10::Device& device, DrawKey key)
    : drawing_(drawing()), generator_(at::globalContext().defaultGenerator(device)) {
  const std::lock_guard lock(generator_.mutex());
  saved_ = generator_.get_state();
  generator_.set_current_seed(seed_of(key));
}

DrawGuard::~DrawGuard() {
  const std::lock_guard lock(generator_.mutex());
  generator_.set_state(saved_);
}

}  // namespace tessera::detail
