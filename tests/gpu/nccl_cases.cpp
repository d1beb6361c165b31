// Tests NCCL's collectives in a group of one rank, on the group itself: the library's own collectives return at once
// where a mesh dimension has one rank.

#include <chrono>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <doctest/doctest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/mesh/collectives/backend_collectives.h"
#include "tessera/mesh/collectives/collective_call.h"
#include "tessera/mesh/core/reduce_op.h"
#include "tessera/mesh/core/wire.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/tests/harness/device.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

constexpr std::chrono::milliseconds kAnotherTimeout = std::chrono::minutes(4);

at::Tensor finish(BackendWork work) {
  for (const auto& each : work.works) each->wait();
  return work.result();
}

// Runs every collective of the library on 12 numbers of `dtype`.
void check_collectives(const CollectiveCall& call, at::ScalarType dtype) {
  const at::Tensor x = at::arange(12, on(dtype));
  const std::vector<int64_t> all = {12};
  CHECK(finish(exchange(call, x, all, all)).equal(x));
  CHECK(finish(gather(call, x, all)).equal(x));
  CHECK(finish(gather_rows(call, x.view({3, 4}))).equal(x.view({1, 3, 4})));
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProduct}) {
    CHECK(finish(reduce_all(call, x, op, /*owned=*/false)).equal(x));
    CHECK(finish(reduce_parts(call, x, all, op)).equal(x));
  }
  if (at::isFloatingType(dtype)) CHECK(finish(reduce_all(call, x, ReduceOp::kAvg, /*owned=*/false)).equal(x));
  if (dtype == at::kLong) CHECK(finish(reduce_all(call, x, ReduceOp::kBitOr, /*owned=*/false)).equal(x));
  CHECK(finish(broadcast_from(call, x.clone(), 0)).equal(x));
  CHECK(finish(scatter_from(call, x.view({1, 12}), x, 0)).equal(x));
}

at::Tensor slow_ones() {
  at::Tensor x = at::full({2048, 2048}, 1.0 / 2048, on(at::kDouble));
  const at::Tensor ones = at::ones({2048, 2048}, on(at::kDouble));
  for (int i = 0; i < 400; ++i) x = at::mm(x, ones) / 2048;
  return x * 2048;
}

}  // namespace

TEST_CASE("NCCL with one rank: every collective of the library gives back what it was given") {
  const DeviceMesh mesh = init_device_mesh("cuda", {1}, {"tp"}, World::create({}));
  CHECK(mesh.group(0)->getBackendName() == "nccl");
  for (const WaitTime wait_time : {WaitTime::kLater, WaitTime::kAtOnce}) {
    const CollectiveCall call = begin_call("test", mesh, 0, wait_time);
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt}) {
      CAPTURE(c10::toString(dtype));
      check_collectives(call, dtype);
    }
    finish(barrier_all(call));
  }
}

TEST_CASE("rows of more than four ranks are added on a GPU as on the CPU") {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    CAPTURE(c10::toString(dtype));
    const at::Tensor rows = at::sin(at::arange(8 * 100'003, at::kDouble)).view({8, -1}).to(dtype);
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
      CHECK(reduce_rows(rows.to(device()), op).cpu().equal(reduce_rows(rows, op)));
    }
  }
}

TEST_CASE("NCCL: a collective that is waited for at once is on the current stream, which need not wait for another") {
  const DeviceMesh mesh = init_device_mesh("cuda", {1}, {"tp"}, World::create({}));
  const at::Tensor x = at::ones({8}, on(at::kFloat));
  const CollectiveCall at_once = begin_call("test", mesh, 0, WaitTime::kAtOnce);
  const CollectiveCall later = begin_call("test", mesh, 0);
  CHECK(reduce_all(at_once, x, ReduceOp::kSum, /*owned=*/false).works.empty());
  CHECK(reduce_all(later, x, ReduceOp::kSum, /*owned=*/false).works.size() == 1);
}

// With one rank NCCL queues no kernel, and so keeps no order between groups (NCCL_LAUNCH_ORDER_IMPLICIT): with several
// ranks the second collective would start only after the first one has.
TEST_CASE("NCCL: the groups of two mesh dimensions have streams of their own, and do not wait for each other") {
  const std::shared_ptr<World> world = World::create({});
  // With one rank all mesh dimensions have one group, unless their options differ.
  const auto first = world->group({0}, at::kCUDA), second = world->group({0}, at::kCUDA, {.timeout = kAnotherTimeout});
  REQUIRE(first != second);
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  const c10::Device gpu(at::kCUDA, 0);
  const c10::Stream slow = guard.getStreamFromGlobalPool(gpu), fast = guard.getStreamFromGlobalPool(gpu);
  std::vector<at::Tensor> a, b = {at::ones({8}, on(at::kFloat))};
  guard.synchronizeDevice(gpu.index());
  c10::intrusive_ptr<c10d::Work> behind_slow_work, alone;
  {
    const c10::StreamGuard current(slow);
    a = {slow_ones()};
    behind_slow_work = first->allreduce(a);
  }
  {
    const c10::StreamGuard current(fast);
    alone = second->allreduce(b);
    alone->wait();
  }
  guard.synchronizeStream(fast);
  CHECK(alone->isCompleted());
  CHECK_FALSE(behind_slow_work->isCompleted());
  const c10::StreamGuard current(slow);
  behind_slow_work->wait();
  CHECK(a[0].eq(1.0).all().item<bool>());
}
