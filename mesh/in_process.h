#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/mesh/world.h"

namespace tessera {

struct InProcessOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // for everything that waits
};

// Runs `body` on `size` ranks that are threads of this process, each with a World of its own, and returns when all have
// ended:
//
//   run_in_process(8, [](const std::shared_ptr<World>& world) {
//     const DeviceMesh mesh = init_device_mesh("cpu", {2, 4}, {"dp", "tp"}, world);
//     ...
//   });
//
// Collectives go through memory, in some microseconds, and a mismatch between ranks is an error on all of them. Give
// every mesh the World. A new thread has LibTorch's default modes: a NoGradGuard of the caller does not reach it;
// autocast's cache of casts alone, which all threads share, is off. Several runs at once, and one inside another, are
// fine. The ranks share this machine's cores: OMP_NUM_THREADS=1 keeps operators on large tensors from starting threads
// for each of them.
//
// When a rank throws, the others' current or next collective throws too, as between processes. Then throws
// std::runtime_error, with the error of the rank that failed first nested in it: "rank 2 of 8: index 7 is out of
// range". When a rank's body returns while others still wait for it, these get an error that says so. Throws
// std::invalid_argument when size < 1.
void run_in_process(int64_t size, const std::function<void(const std::shared_ptr<World>&)>& body,
                    const InProcessOptions& options = {});

// The Worlds of such ranks, by rank, for threads of your own: a World per thread. A rank whose World is gone has left
// its groups. Under autocast each thread must have called at::autocast::set_autocast_cache_enabled(false).
std::vector<std::shared_ptr<World>> make_in_process_worlds(int64_t size, const InProcessOptions& options = {});

}  // namespace tessera
