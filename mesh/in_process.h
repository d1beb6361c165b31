#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/mesh/world.h"

namespace tessera {

struct InProcessOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // limit of each wait for other ranks
  int device_index = 0;                                         // the CUDA device that all ranks share
};

// Runs `body` on `size` ranks, each a thread of this process with its own World, and returns when all have ended:
//
//   run_in_process(8, [](const std::shared_ptr<World>& world) {
//     const DeviceMesh mesh = init_device_mesh("cpu", {2, 4}, {"dp", "tp"}, world);
//     ...
//   });
//
// Collectives copy within memory and take some tens of microseconds; a mismatch between ranks throws on all of them.
// Pass the World to every mesh. The threads have LibTorch's default modes, so the caller's NoGradGuard does not apply
// in them; but autocast's cache of casts, which all threads share, is switched off. Runs may be nested and may run at
// the same time. The ranks share this machine's cores: with OMP_NUM_THREADS=1 operators on large tensors do not start
// more threads on each rank.
//
// A mesh on "cuda" puts the tensors of all ranks on one GPU, for development and tests. Backward runs on each rank's
// own thread: LibTorch's one thread per GPU could not serve ranks that wait for each other.
//
// A tensor may outlive its run and be computed with, but what is decided about it is not kept for long.
//
// When a rank throws, the current or next collective of the other ranks throws too, as between processes. When all
// ranks have ended, this function then throws std::runtime_error, in which the error of the rank that failed first is
// nested: "rank 2 of 8: index 7 is out of range". When a rank's body returns while others still wait for it, these get
// an error that says so. Throws std::invalid_argument when size < 1.
//
// With TESSERA_RECORDS=FOLDER every rank writes its records when one throws, as the processes of a job do (and to
// FOLDER/restart_1 after a restart); a single rank writes none. A file is named by its rank alone, so each run begins
// by removing the files of the one before, and runs at the same time, also in processes of one job, replace each
// other's.
void run_in_process(int64_t size, const std::function<void(const std::shared_ptr<World>&)>& body,
                    const InProcessOptions& options = {});

// Returns the Worlds of such ranks, ordered by rank, for threads that the caller starts: give each thread one, which
// calls World::retire() when its rank has done its part. Tensors and caches may hold the World, so that the other ranks
// would else wait for it until the limit. Under autocast each thread must first call
// at::autocast::set_autocast_cache_enabled(false). TESSERA_RECORDS holds for them too: a rank that fails calls
// World::fail.
std::vector<std::shared_ptr<World>> make_in_process_worlds(int64_t size, const InProcessOptions& options = {});

}  // namespace tessera
