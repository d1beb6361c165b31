// Tests what Checked compares as the same on every rank, on ranks that are threads.
#include "tessera/mesh/collectives/checked.h"

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/clip_grad_norm.h"
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

TEST_CASE("ranks that send other pieces by scatter, between meshes, or for a norm of another order are told") {
  run_in_process(2, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, world);
    const bool odd = world->rank() == 1;
    const at::Tensor square = at::arange(16, at::kDouble).view({4, 4});
    const at::Tensor rows = distribute_tensor(square, mesh, {Shard(0)});
    at::Tensor weight = distribute_tensor(square, mesh, {Shard(0)}).requires_grad_();
    weight.mutable_grad() = rows;
    const DeviceMesh turned(world, c10::DeviceType::CPU, Mesh({2}, {"tp"}, std::vector<int64_t>{1, 0}));
    const Checked checked(mesh);
    check_mismatch([&] { distribute_tensor(square, mesh, {Shard(odd ? 1 : 0)}); },
                   "ranks [1]: distribute_tensor: scatter");
    check_mismatch([&] { redistribute_to(rows, turned, {odd ? BlockCyclic(0, 1) : Shard(0)}); },
                   "[S(0)] on ranks [0, 1] -> [BC(0,1)] on ranks [1, 0]");
    check_mismatch([&] { clip_grad_norm_({weight}, 1e9, odd ? 1.0 : 2.0); }, "norm of order 1");
    CHECK(full_tensor(distribute_tensor(square, mesh, {Shard(1)})).equal(square));
    CHECK(full_tensor(redistribute_to(rows, turned, {Shard(0)})).equal(square));
    CHECK(clip_grad_norm_({weight}, 1e9) == doctest::Approx(square.norm().item<double>()));
  });
}
