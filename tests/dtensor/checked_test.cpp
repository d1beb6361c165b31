// What counts as the same on every rank, compared by Checked.
#include "tessera/mesh/checked.h"

#include <string>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/modes.h"
#include "tessera/mesh/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/mesh/mismatch.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;

namespace {

template <typename Call>
void check_mismatch(const Call& call, const std::string& part) {
  CAPTURE(part);
  CHECK_THROWS_WITH_AS(call(), doctest::Contains(part.c_str()), MismatchError);
}

// The last rank holds another value.
void check_unequal(const std::shared_ptr<World>& world) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, world);
  const at::Tensor rows = distribute_tensor(at::ones({4, 2}), mesh, {Shard(0)});
  const Checked checked(mesh);
  const ImplicitReplication implicit;
  const double mine = world->rank() == 1 ? 3.0 : 2.0;
  CommCounter counter(mesh);
  check_mismatch([&] { rows.add(at::full({2}, mine)); },
                 "aten::add: a plain tensor that counts as replicated is not the same");
  check_mismatch([&] { rows.mul(at::scalar_tensor(mine)); }, "ranks [1]: Float () of content");
  check_mismatch([&] { from_local(at::full({2}, mine), mesh, {Replicate()}); }, "Checked: from_local: a plain tensor");
  // Without a source it is to take each rank's own values.
  CHECK_NOTHROW(distribute_tensor(at::full({2}, mine), mesh, {Shard(0)}, kNoSource));
  CHECK(counter.total() == 0);
  // Pieces differ, as they may.
  CHECK(full_tensor(from_local(at::full({1}, mine), mesh, {Shard(0)})).sum().item<double>() == 5);
  CHECK(full_tensor(rows.add(at::full({2}, 2.0))).eq(3).all().item<bool>());
}

// Only what is replicated on a mesh dimension is compared there.
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

TEST_CASE("ranks that are threads: a plain operand that is not the same on every rank is refused") {
  run_in_process(2, check_unequal);
  run_in_process(4, check_by_dimension);
}

TESSERA_RANKS_TEST_CASE("over Gloo: a plain operand that is not the same on every rank is refused", {2}) {
  check_unequal(testing::world());
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
