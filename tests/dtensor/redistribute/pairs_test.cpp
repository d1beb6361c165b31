// Tests every pair of layouts, on ranks that are threads.

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/explain.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/dtensor/redistribute/pairs.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"

using namespace tessera;
using namespace tessera::testing;
using Sizes = std::vector<int64_t>;

TEST_CASE("one mesh dimension: every pair, every shape, and gradients") {
  for (const Sizes& mesh_shape : {Sizes{1}, Sizes{2}, Sizes{3}, Sizes{4}}) {
    for (const Sizes& shape : kShapes) {
      const std::vector<Placements> layouts = built_in_layouts(shape, mesh_shape);
      CHECK(layouts.size() >= 15);  // so that no filter leaves only a few
      check_in_process(all_pairs(layouts), shape, mesh_shape);
    }
  }
}

TEST_CASE("two and three mesh dimensions: pairs drawn by seed, and gradients") {
  for (const Sizes& mesh_shape : {Sizes{2, 2}, Sizes{2, 3}, Sizes{1, 2, 2}, Sizes{2, 2, 2}}) {
    for (std::size_t i = 0; i < kShapes.size(); ++i) {
      const std::vector<Placements> layouts = built_in_layouts(kShapes[i], mesh_shape);
      CHECK(layouts.size() >= 100);
      const uint32_t seed = 20260103 + static_cast<uint32_t>(i);  // other pairs for each shape
      check_in_process(some_pairs(layouts, 60, seed), kShapes[i], mesh_shape);
    }
  }
}

TEST_CASE("an all_reduce of the parts that its group needs leaves every rank its own part") {
  run_in_process(8, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2, 2}, {}, world);
    const CostModel model = CostModel::nvlink_infiniband(mesh.mesh(), 2);
    const Placements to = {RaggedShard(0, {2, 3}), Replicate(), Shard(0)};
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax}) {
      const Placements from(3, Partial(op));
      const at::Tensor whole = whole_numbers({5, 7});
      const at::Tensor source = spread(whole, mesh, from);
      const std::vector<PlanStep> steps = explain(source, to, model).plan.steps();
      CHECK(steps.back().kind == PlanStep::Kind::kAllReduce);
      CHECK((steps.back().to == to));
      const at::Tensor before = to_local(source).clone();
      CHECK(same(full_tensor(redistribute(source, to, {.cost_model = model})), whole));
      const std::vector<at::Tensor> both =
          redistribute_many({source, spread(whole * 2, mesh, from)}, {to, to}, {.cost_model = model});
      CHECK(same(full_tensor(both[0]), whole));
      CHECK(same(full_tensor(both[1]), whole * 2));
      CHECK(same(to_local(source), before));
    }
  });
}

TEST_CASE("a sum that becomes an average is scaled without communication") {
  run_in_process(3, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {3}, {}, world);
    const at::Tensor whole = whole_numbers({2, 5});
    at::Tensor sum = spread(whole, mesh, {Partial()});
    const CommCounter counter(*world);
    const at::Tensor average = redistribute(sum, {Partial(ReduceOp::kAvg)});
    const at::Tensor back = redistribute(average, {Partial()});
    CHECK(counter.records().empty());
    CHECK(same(to_local(average), to_local(sum) * 3));
    CHECK(same(to_local(back), to_local(sum)));
    CHECK(same(full_tensor(average), whole));
    sum.requires_grad_(true);
    full_tensor(redistribute(sum, {Partial(ReduceOp::kAvg)})).sum().backward();
    CHECK(same(full_tensor(sum.grad()), at::ones({2, 5}, on(at::kDouble))));
  });
}

TEST_CASE("a mean of halves, and a norm, whose terms would overflow") {
  run_in_process(4, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {4}, {}, world);
    const auto pending = [&](double piece, const Placement& placement) {
      return from_local(at::full({8}, piece, on(at::kHalf)), mesh, {placement});
    };
    for (const Placement& to : {Replicate(), Shard(0)}) {
      const at::Tensor mean = full_tensor(redistribute(pending(30000, Partial(ReduceOp::kAvg)), {to}));
      CHECK(same(mean, at::full({8}, 30000, on(at::kHalf))));
      CHECK(same(full_tensor(redistribute(pending(300, NormPartial(2)), {to})), at::full({8}, 600, on(at::kHalf))));
    }
    // 30000 would overflow if it were scaled.
    const at::Tensor zero = pending(mesh.local_rank(0) < 2 ? 30000 : -30000, Partial());
    CHECK(same(full_tensor(redistribute(zero, {Partial(ReduceOp::kAvg)})), at::zeros({8}, on(at::kHalf))));
    // So would 4 * 30000, the piece of the one rank that has the value where the others have 0.
    const at::Tensor sum = pending(mesh.local_rank(0) == 0 ? 30000 : 0, Partial());
    const at::Tensor cut = redistribute(sum, {Shard(0)});
    for (const at::Tensor& x : {sum, cut}) {
      CHECK(same(full_tensor(redistribute(x, {Partial(ReduceOp::kAvg)})), at::full({8}, 30000, on(at::kHalf))));
    }
    const std::vector<at::Tensor> both =
        redistribute_many({pending(30000, Partial(ReduceOp::kAvg)), zero}, {{Replicate()}, {Replicate()}});
    CHECK(same(to_local(both[0]), at::full({8}, 30000, on(at::kHalf))));
    CHECK(same(to_local(both[1]), at::zeros({8}, on(at::kHalf))));
  });
}

TEST_CASE("integers and their bits: every pair on one mesh dimension, some on two") {
  for (std::size_t i = 0; i < kShapes.size(); ++i) {
    const Sizes& shape = kShapes[i];
    const std::vector<Placements> on_line = integer_layouts(shape, {4});
    CHECK(on_line.size() >= 10);
    check_in_process(all_pairs(on_line), shape, {4}, at::kLong);
    for (const Sizes& mesh_shape : {Sizes{2, 2}, Sizes{2, 3}}) {
      const std::vector<Placements> layouts = integer_layouts(shape, mesh_shape);
      CHECK(layouts.size() >= 50);
      check_in_process(some_pairs(layouts, 200, 20260107 + static_cast<uint32_t>(i)), shape, mesh_shape, at::kLong);
    }
  }
}
