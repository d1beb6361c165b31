#include <sstream>
#include <stdexcept>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/explain.h"

using namespace tessera;

namespace {

at::Tensor sharded(const Placements& placements, const std::vector<int64_t>& mesh_shape) {
  int64_t ranks = 1;
  for (const int64_t n : mesh_shape) ranks *= n;
  const DeviceMesh mesh = init_device_mesh("cpu", mesh_shape, {"dp", "tp"}, World::fake(0, ranks));
  return distribute_tensor(at::empty({64, 64}), mesh, placements, kNoSource);
}

}  // namespace

TEST_CASE("explain prints the plan beside the lower bound and beside gathering everything") {
  const at::Tensor t = sharded({Shard(0), Shard(1)}, {2, 2});
  const Explanation told = explain(t, {Shard(1), Shard(0)});
  CHECK(told.plan.max_bytes() == told.lower_bound.max_bytes);
  CHECK(told.plan.max_bytes() == 32 * 32 * 4);
  CHECK(told.gather_everything.max_bytes() == 3 * 32 * 32 * 4);
  CHECK(told.gather_everything.steps().back().to == Placements{Shard(1), Shard(0)});
  std::ostringstream text;
  text << told;
  CHECK(text.str() ==
        "Float [64, 64] on {dp: 2, tp: 2} on cpu as [S(0), S(1)] to [S(1), S(0)]:\n"
        "  permute on dp+tp: [S(0), S(1)] -> [S(1), S(0)], 4096 bytes, 122 us\n"
        "bytes              most by a rank         by all           live           us\n"
        "this plan                    4096           8192          16384          122\n"
        "lower bound                  4096           8192\n"
        "gather everything           12288          49152          45056        126.1\n");
}

TEST_CASE("explain follows the cost model, plans nothing for the same layout, and refuses what redistribute refuses") {
  const at::Tensor t = sharded({Shard(0), Replicate()}, {2, 2});
  CHECK(explain(t, {Shard(0), Replicate()}).plan.steps().empty());
  CHECK(explain(t, {Replicate(), Replicate()}, CostModel::bytes_only(2)).plan.microseconds() == 8192);
  CHECK_THROWS_AS(explain(t, {Shard(2), Replicate()}), std::invalid_argument);
  CHECK_THROWS_AS(explain(t, {Replicate(), Replicate()}, CostModel::gloo(3)), std::invalid_argument);
  CHECK_THROWS_AS(explain(at::empty({2}), {Replicate()}), std::invalid_argument);
}
