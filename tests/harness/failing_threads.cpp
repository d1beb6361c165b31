// These test cases, whose ranks are threads, fail and hang on purpose. harness_test runs this program and reads its
// output.

#include <chrono>
#include <mutex>
#include <stdexcept>

#include <ATen/ops/full.h>

#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/tests/harness/ranks.h"

using tessera::testing::rank;
using tessera::testing::Ranks;
using tessera::testing::world;
using tessera::testing::world_size;

namespace {

// Waits for all ranks.
double sum_of_ranks() {
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {world_size()}, {"all"}, world());
  const at::Tensor mine = at::full({1}, static_cast<double>(rank()), at::kDouble);
  return tessera::all_reduce(mine, mesh, 0, tessera::ReduceOp::kSum).item().toDouble();
}

}  // namespace

TESSERA_RANKS_TEST_CASE("all is well", {1, 3}) {
  CHECK(world()->rank() == rank());
  CHECK(sum_of_ranks() == (world_size() == 1 ? 0 : 3));
}

TESSERA_RANKS_TEST_CASE("a check fails on rank 1", {2, 4}) {
  if (rank() == 1) CHECK_MESSAGE(rank() == 10, "the message");
}

TESSERA_RANKS_TEST_CASE("a requirement fails on rank 1, and rank 0 waits for it", {2}) {
  REQUIRE(rank() == 0);
  sum_of_ranks();
}

TESSERA_RANKS_TEST_CASE("an exception on rank 2", {3}) {
  if (rank() == 2) throw std::runtime_error("thrown by rank 2");
  sum_of_ranks();
}

TESSERA_RANKS_TEST_CASE("rank 1 waits for ever", Ranks({2}).time_limit(std::chrono::seconds(2))) {
  static std::mutex held;
  if (rank() == 0) held.lock();
  if (rank() == 1) held.lock();
  sum_of_ranks();
}

TESSERA_RANKS_TEST_CASE("nothing is checked", {2}) {}

TESSERA_RANKS_TEST_CASE("a subcase", {2}) {
  SUBCASE("one") { CHECK(true); }
}

TESSERA_RANKS_TEST_CASE("rank 1 is skipped", {2}) {
  if (rank() == 1) TESSERA_SKIP("it lacks something");
  CHECK(rank() == 0);
}
