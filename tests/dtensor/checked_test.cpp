// Tests what Checked compares as the same on every rank, on ranks that are threads.
#include "tessera/mesh/collectives/checked.h"

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/dtensor/checked_cases.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// A tensor is compared only on mesh dimensions on which it is replicated.
void check_by_dimension(const std::shared_ptr<World>& world) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world);
  const Checked checked(mesh);
  const auto d = static_cast<double>(mesh.local_rank("dp")), t = static_cast<double>(mesh.local_rank("tp"));
  CHECK_NOTHROW(from_local(at::full({2}, d), mesh, {Shard(0), Replicate()}));
  check_mismatch(
      [&] {
        from_local(at::full({2}, t), mesh, {Shard(0), Replicate()});
      },
      mesh.local_rank("dp") == 0 ? "ranks [1]: " : "ranks [3]: ");
}

}  // namespace

TEST_CASE("a plain operand that is not the same on every rank is refused") {
  run_in_process(2, check_unequal);
  run_in_process(4, check_by_dimension);
}

TEST_CASE("the step of a redistribution is named") {
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, world);
    const at::Tensor rows = distribute_tensor(at::ones({4, 2}), mesh, {Shard(0)});
    const Checked checked(mesh);
    check_mismatch(
        [&] { redistribute(rows, {world->rank() == 0 ? Placement(Replicate()) : Placement(Shard(1))}); },
        "redistribute: all_gather of Float in pieces of [4, 4] on mesh dimension tp, step [S(0)] -> [R], collective ");
  });
}
