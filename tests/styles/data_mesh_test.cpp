// Trains on meshes whose dimensions split the batch, against one process.

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>
#include <torch/nn/modules/linear.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/checked.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/blocks.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

}  // namespace

TESSERA_RANKS_TEST_CASE(
    "a mesh for data alone: gradients equal one process, with whole parameters and with ZeRO's stages", {1, 2, 3, 4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {world_size()}, {"dp"}, world());
  const at::Tensor x = numbers({12, 6});
  const std::vector<ParallelizeOptions> all = {{.tensor_dim = {}},
                                               {.data_dims = std::vector<int64_t>{0}},
                                               {.data_placement = Shard(0)},
                                               {.data_placement = Shard(0), .zero_stage = 2},
                                               {.data_placement = Shard(0), .zero_stage = 1}};
  for (std::size_t i = 0; i < all.size(); ++i) {
    CAPTURE(i);
    torch::nn::Linear reference(6, 5), module(6, 5);
    fill(*reference);
    fill(*module);
    auto dp = parallelize_module(module, mesh, ParallelPlan{}, all[i]);
    CHECK(placements_of(module->weight)[0].is_shard() == all[i].data_placement.has_value());
    for (int step = 0; step < 2; ++step) {
      CAPTURE(step);
      reference->zero_grad();
      module->zero_grad();
      const at::Tensor want = reference->forward(x), got = dp(distribute_tensor(x, mesh, {Shard(0)}, kNoSource));
      CHECK(difference(got, want) <= 1e-12);
      want.square().mean().backward();
      got.square().mean().backward();
      check_parameters(*module, *reference, /*gradients=*/true, 1e-12);
    }
    if (world_size() > 1) {
      CHECK_THROWS_WITH_AS(dp(x), doctest::Contains("[12, 6] is plain, and on the mesh {dp: "), std::invalid_argument);
    }
  }
}

TESSERA_RANKS_TEST_CASE("over data dimensions of one rank each, plain inputs are this rank's pieces", {1, 2, 3}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {1, world_size()}, {"dp", "tp"}, world());
  const at::Tensor x = numbers({4, 6});
  Mlp reference(6, 12, 5), module(6, 12, 5);
  fill(*reference);
  fill(*module);
  auto tp = parallelize_module(module, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
  const at::Tensor want = reference->forward(x), got = tp(x);
  CHECK(difference(got, want) <= 1e-12);
  want.square().mean().backward();
  got.square().mean().backward();
  check_parameters(*module, *reference, /*gradients=*/true, 1e-12);
}

TESSERA_RANKS_TEST_CASE("under InferenceMode each data rank may give a plain batch of its own, with styles too",
                        {2, 4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, world_size() / 2}, {"dp", "tp"}, world());
  const at::Tensor x = numbers({2, 3, 6}).select(0, mesh.local_rank("dp"));
  Mlp reference(6, 12, 5), module(6, 12, 5);
  fill(*reference);
  fill(*module);
  auto tp = parallelize_module(module, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
  CHECK_THROWS_WITH_AS(tp(x), doctest::Contains("[3, 6] is plain, and on the mesh {dp: 2"), std::invalid_argument);
  const ImplicitReplication plain_counts;
  CHECK_THROWS_WITH_AS(module->forward(x), doctest::Contains("leave the module out of the plan"),
                       std::invalid_argument);
  const c10::InferenceMode inference;
  const Checked unchecked(mesh, false);  // it would compare the ranks' batches
  CHECK(close(to_local(tp(x)), reference->forward(x), 1e-12));
  CHECK(close(to_local(module->forward(x)), reference->forward(x), 1e-12));
}

TESSERA_RANKS_TEST_CASE("a bias is added before a local output is returned, for batches of any shape", {2, 4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, world_size() / 2}, {"dp", "tp"}, world());
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{5, 6}, std::vector<int64_t>{5, 3, 6}}) {
    CAPTURE(shape.size());
    for (const bool whole : {true, false}) {  // the output is whole on each tp rank, or cut along the features
      CAPTURE(whole);
      Mlp reference(6, 12, 4), module(6, 12, 4);
      fill(*reference);
      fill(*module);
      const Style last = whole ? Style(RowwiseParallel({.use_local_output = true}))
                               : Style(ColwiseParallel({.use_local_output = true}));
      auto tp = parallelize_module(module, mesh, {{"up", ColwiseParallel()}, {"down", last}});
      const at::Tensor x = numbers(shape), want = reference->forward(x);
      const at::Tensor got = tp(distribute_tensor(x, mesh, {Shard(0), Replicate()}, kNoSource));
      REQUIRE_FALSE(is_dtensor(got));
      const Placements layout = {Shard(0), whole ? Replicate() : Shard(-1)};
      const at::Tensor own = to_local(distribute_tensor(want.detach(), mesh, layout, kNoSource));
      CHECK(close(got.detach(), own, 1e-12));
      want.square().sum().backward();
      got.square().sum().backward();
      check_parameters(*module, *reference, /*gradients=*/true, 1e-12);
    }
  }
}

TESSERA_RANKS_TEST_CASE("a local output whose sequence is cut along a mesh dimension of its own: the bias sums over it",
                        {2, 4}) {
  const std::vector<int64_t> shape = world_size() == 2 ? std::vector<int64_t>{1, 2, 1} : std::vector<int64_t>{2, 2, 1};
  const DeviceMesh mesh = init_device_mesh(device_name(), shape, {"dp", "cp", "tp"}, world());
  Mlp reference(6, 12, 4), module(6, 12, 4);
  fill(*reference);
  fill(*module);
  auto tp = parallelize_module(module, mesh,
                               {{"up", ColwiseParallel()}, {"down", RowwiseParallel({.use_local_output = true})}},
                               {.data_dims = std::vector<int64_t>{0}});
  const at::Tensor x = numbers({3, 5, 6}), want = reference->forward(x);
  const Placements layout = {Shard(0), Shard(1), Replicate()};
  const at::Tensor got = tp(distribute_tensor(x, mesh, layout, kNoSource));
  CHECK(close(got.detach(), to_local(distribute_tensor(want.detach(), mesh, layout, kNoSource)), 1e-12));
  want.square().sum().backward();
  got.square().sum().backward();
  check_parameters(*module, *reference, /*gradients=*/true, 1e-12);
}
