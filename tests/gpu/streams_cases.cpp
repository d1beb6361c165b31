// Tests what a GPU alone has: streams, and work that is queued.

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/block_plans.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/tp_line.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

c10::Stream stream_of_pool() {
  const c10::impl::VirtualGuardImpl guard(device().type());
  return guard.getStreamFromGlobalPool(c10::Device(device().type(), 0));
}

// Returns `value` in every element, computed by work that keeps the stream busy for some milliseconds.
at::Tensor slow_fill(double value) {
  at::Tensor x = at::ones({2048, 2048}, on(at::kDouble)) / 2048;
  for (int i = 0; i < 8; ++i) x = at::mm(x, at::ones({2048, 2048}, on(at::kDouble))) / 2048;
  return (x * 2048).slice(0, 0, 256).mul(value);
}

}  // namespace

TESSERA_RANKS_TEST_CASE("a collective of ranks on streams of their own waits for what each of them has queued",
                        {2, 3, 4}) {
  const DeviceMesh mesh = tp_line();
  const auto n = static_cast<double>(world_size()), me = static_cast<double>(world()->rank());
  const c10::StreamGuard stream(stream_of_pool());
  for (int round = 0; round < 10; ++round) {
    const at::Tensor mine = slow_fill(me + 1);
    const at::Tensor sum = all_reduce(mine, mesh, 0, ReduceOp::kSum);
    CHECK(sum.eq(n * (n + 1) / 2).all().item<bool>());
    const at::Tensor rows = all_gather(slow_fill(me), mesh, 0);
    CHECK(rows.select(0, world_size() - 1).eq(n - 1).all().item<bool>());
    // The input may be overwritten at once, since the stream has waited until the other ranks have had it.
    at::Tensor again = slow_fill(me);
    const at::Tensor kept = all_gather(again, mesh, 0);
    again.fill_(-1);
    CHECK(kept.select(0, 0).eq(0.0).all().item<bool>());
  }
}

TESSERA_RANKS_TEST_CASE("training on a stream of the user's own gives what the default stream gives", {1, 2, 4}) {
  const DeviceMesh mesh = tp_line();
  Block reference(24, 12, 32), block(24, 12, 32);
  fill(*reference);
  fill(*block);
  const at::Tensor x = numbers({2, 5, 24});
  const at::Tensor want = reference->forward(x);
  want.square().mean().backward();
  const c10::impl::VirtualGuardImpl guard(device().type());
  auto tp = parallelize_module(block, mesh, kBlock);
  guard.synchronizeDevice(0);
  {
    const c10::StreamGuard stream(stream_of_pool());
    const at::Tensor got = tp(x);
    got.square().mean().backward();
    guard.synchronizeDevice(0);
    CHECK(difference(got, want) <= 1e-12);
  }
  check_parameters(*block, *reference, /*gradients=*/true, 1e-12, {"wk.bias"});
}

TESSERA_RANKS_TEST_CASE("a block forward and backward a hundred times, without a deadlock",
                        tessera::testing::Ranks({4}).time_limit(std::chrono::seconds(50))) {
  const DeviceMesh mesh = tp_line();
  Block reference(24, 12, 32), block(24, 12, 32);
  fill(*reference);
  fill(*block);
  const at::Tensor x = numbers({2, 5, 24});
  const at::Tensor want = reference->forward(x);
  auto tp = parallelize_module(block, mesh, kBlock);
  for (int i = 0; i < 100; ++i) {
    block->zero_grad();
    const at::Tensor got = tp(x);
    got.square().mean().backward();
    if (i % 25 == 0) CHECK(difference(got, want) <= 1e-12);
  }
}

TESSERA_RANKS_TEST_CASE("a mesh on a GPU makes its device the current one and refuses tensors on another", {1, 2}) {
  const DeviceMesh mesh = tp_line();
  CHECK(mesh.device() == c10::Device(device().type(), 0));
  const c10::impl::VirtualGuardImpl guard(device().type());
  CHECK(guard.getDevice() == mesh.device());
  CHECK_THROWS_AS(from_local(at::ones({2}), mesh, {Shard(0)}, {.check = true}), std::invalid_argument);
  CHECK_THROWS_AS(all_reduce(at::ones({2}), mesh, 0, ReduceOp::kSum), std::invalid_argument);
  CHECK(full_tensor(distribute_tensor(at::ones({5}), mesh, {Shard(0)})).device() == mesh.device());
}
