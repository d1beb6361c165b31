// Trains on a mesh of one dimension that splits the batch, against one process.

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>
#include <torch/nn/modules/linear.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/styles/parallelize.h"
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
