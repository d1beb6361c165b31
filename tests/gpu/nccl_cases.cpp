// Tests NCCL's collectives in a group of one rank, on the group itself: the library's own collectives return at once
// where a mesh dimension has one rank.

#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/mesh/collectives/backend_collectives.h"
#include "tessera/mesh/collectives/collective_call.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/tests/harness/device.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

at::Tensor finish(BackendWork work) {
  for (const auto& each : work.works) each->wait();
  return work.result();
}

}  // namespace

TEST_CASE("NCCL with one rank: every collective of the library gives back what it was given") {
  const DeviceMesh mesh = init_device_mesh("cuda", {1}, {"tp"}, World::create({}));
  CHECK(mesh.group(0)->getBackendName() == "nccl");
  const CollectiveCall call = begin_call("test", mesh, 0);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt}) {
    CAPTURE(c10::toString(dtype));
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
  finish(barrier_all(call));
}
