#include <chrono>
#include <exception>
#include <memory>

#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_inv.h>
#include <doctest/doctest.h>

#include "tessera/mesh/in_process.h"
#include "tessera/mesh/world.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/rank_report.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera::testing {
namespace {

thread_local const std::shared_ptr<World>* world_of_thread = nullptr;

// LibTorch loads its linear algebra for a GPU at the first use, which two threads must not do at once.
void load_linear_algebra() {
  static const bool loaded = [] {
    if (device().is_cuda()) at::linalg_inv(at::eye(1, on(at::kDouble)));
    return true;
  }();
  (void)loaded;
}

void run_as_threads(int64_t size, void (*body)(), std::chrono::milliseconds limit) {
  const auto run = [&](const std::shared_ptr<World>& world) {
    const ThreadRank here(world->rank(), size);
    world_of_thread = &world;
    // doctest is not made for threads that leave an INFO by exceptions at the same time.
    std::exception_ptr thrown;
    {
      INFO("rank ", world->rank(), " of ", size);
      try {
        body();
      } catch (...) {
        thrown = std::current_exception();
      }
    }
    if (thrown) std::rethrow_exception(thrown);
  };
  load_linear_algebra();
  run_in_process(size, run, {.timeout = limit});
}

const bool kRegistered = use_to_run_threads(&run_as_threads);

}  // namespace

const std::shared_ptr<World>& world() {
  if (world_of_thread != nullptr) return *world_of_thread;
  rank();  // throws outside a rank
  static const std::shared_ptr<World> only = World::from_environment();
  return only;
}

}  // namespace tessera::testing
