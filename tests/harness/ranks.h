#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/tests/harness/device_name.h"
#include "tessera/tests/harness/rank_report.h"
#include "tessera/tests/harness/skip.h"

// Defines a test case whose body runs in several processes that communicate over Gloo, or over MPI, or in threads of
// one process (`backends` of tessera_distributed_test). CHECKs count in each of them: on each number of ranks, one rank
// at least must evaluate one. Those that a body evaluates in a process that it forks itself are lost, with their
// failures: let it check an exit code.
//
//   TESSERA_RANKS_TEST_CASE("every rank gets the sum", {1, 2, 4}) {
//     const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {world_size()}, {}, world());
//     ...
//   }
//
// The time limit is 60 seconds for each number of ranks. Another one is given so:
//   TESSERA_RANKS_TEST_CASE("a long one", tessera::testing::Ranks({2, 4}).time_limit(std::chrono::seconds(200)))
// TESSERA_TEST_SECONDS, if it is set, gives the limit of each number of ranks of every case, in the place of its own.
//
// The body's processes are new, so other cases do not affect it. SUBCASEs work, if every rank enters the same ones and
// ranks are processes. Ranks that are threads share what LibTorch has once for a process, such as its default random
// generator. The case fails when one rank fails, or exits before the end of its body (exit(0)), and shows the output of
// the first such rank. The numbers of ranks, at least one, run one after the other and stop at a failure, or at a skip.
#define TESSERA_RANKS_TEST_CASE(name, ...) \
  TESSERA_RANKS_TEST_CASE_(DOCTEST_ANONYMOUS(tessera_ranks_body_), name, __VA_ARGS__)

#define TESSERA_RANKS_TEST_CASE_(body, name, ...)                                                 \
  static void body();                                                                             \
  DOCTEST_TEST_CASE(name) {                                                                       \
    ::tessera::testing::run_on_ranks(name, __FILE__ ":" DOCTEST_TOSTR(body), __VA_ARGS__, &body); \
  }                                                                                               \
  static void body()

namespace tessera {
class World;
}

namespace tessera::testing {

// Holds the numbers of ranks on which a body runs, and its time limit.
class Ranks {
 public:
  Ranks(std::initializer_list<int64_t> sizes) : sizes_(sizes) {}

  Ranks time_limit(std::chrono::milliseconds limit) const {
    Ranks changed = *this;
    changed.limit_ = limit;
    return changed;
  }

  const std::vector<int64_t>& sizes() const { return sizes_; }
  std::chrono::milliseconds limit() const { return limit_; }

 private:
  std::vector<int64_t> sizes_;
  std::chrono::milliseconds limit_ = std::chrono::seconds(60);
};

// TESSERA_RANKS_TEST_CASE calls this. In the test's own process it starts the ranks; in a rank that was started for
// `place` it runs `body`. Cases may share a name, but not a place.
void run_on_ranks(const char* name, const char* place, const Ranks& ranks, void (*body)());

// Returns a rank's World, the same one for the life of the process or thread. Throws std::logic_error elsewhere.
const std::shared_ptr<World>& world();

// Runs a body on `size` ranks that are threads of this process; a wait for another rank ends after `limit`.
using RunAsThreads = void (*)(int64_t size, void (*body)(), std::chrono::milliseconds limit);
// Gives run_on_ranks the function that runs ranks as threads. The library with world() does: it alone needs LibTorch.
bool use_to_run_threads(RunAsThreads run);

}  // namespace tessera::testing
