#include "tessera/tests/dtensor/checked_cases.h"

#include <ATen/ATen.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/comm_counter.h"

namespace tessera::testing {

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
  // Without a source, each rank keeps its own values.
  CHECK_NOTHROW(distribute_tensor(at::full({2}, mine), mesh, {Shard(0)}, kNoSource));
  CHECK(counter.total() == 0);
  // Pieces may differ.
  CHECK(full_tensor(from_local(at::full({1}, mine), mesh, {Shard(0)})).sum().item<double>() == 5);
  CHECK(full_tensor(rows.add(at::full({2}, 2.0))).eq(3).all().item<bool>());
}

}  // namespace tessera::testing
