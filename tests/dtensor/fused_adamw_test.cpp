// Tests FusedAdamW beside torch::optim::AdamW on whole parameters.

#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/optim/adamw.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/fused_adamw.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/refused.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

// One parameter on both sides.
struct Pair {
  at::Tensor ours, plain;

  void set_gradients(int64_t seed) {
    const at::Tensor gradient = sample(plain.sizes(), seed, plain.scalar_type());
    plain.mutable_grad() = gradient.clone();
    ours.mutable_grad() = is_dtensor(ours) ? spread(gradient, mesh_of(ours), placements_of(ours)) : gradient.clone();
  }
};

std::vector<Pair> make_pairs(at::ScalarType dtype) {
  std::vector<Pair> out;
  const auto add = [&](const std::vector<int64_t>& sizes, const std::optional<DeviceMesh>& mesh,
                       const Placements& placements) {
    const at::Tensor whole = sample(sizes, static_cast<int64_t>(out.size()), dtype);
    out.push_back({mesh ? leaf(whole, *mesh, placements) : leaf(whole), leaf(whole)});
  };
  for (const DeviceMesh& mesh : meshes()) {
    const auto dims = static_cast<std::size_t>(mesh.ndim());
    add({5, 3}, mesh, Placements(dims, Shard(0)));
    add({2, 7}, mesh, Placements(dims, Shard(1)));
    add({4}, mesh, Placements(dims, Replicate()));
    add({1, 3}, mesh, Placements(dims, Shard(0)));  // some ranks hold nothing
  }
  add({3, 2}, std::nullopt, {});
  return out;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("FusedAdamW equals torch::optim::AdamW on shards, on several meshes and beside plain tensors",
                        {1, 2, 3, 4}) {
  for (const auto& [dtype, limit] :
       {std::pair(at::kDouble, device().is_cpu() ? 1e-12 : 1e-6), std::pair(at::kFloat, 1e-5)}) {
    for (const bool amsgrad : {false, true}) {
      CAPTURE(amsgrad);
      std::vector<Pair> pairs = make_pairs(dtype);
      std::vector<at::Tensor> ours, plain;
      for (const Pair& each : pairs) {
        ours.push_back(each.ours);
        plain.push_back(each.plain);
      }
      FusedAdamW fused(ours, {.lr = 0.05, .weight_decay = 0.1, .amsgrad = amsgrad});
      torch::optim::AdamW theirs(plain, torch::optim::AdamWOptions(0.05).weight_decay(0.1).amsgrad(amsgrad));
      const CommCounter counter(line());
      for (int64_t step = 0; step < 4; ++step) {
        for (std::size_t i = 0; i < pairs.size(); ++i) {
          if (step != 1 || i != 0) pairs[i].set_gradients(10 * step + static_cast<int64_t>(i));
        }
        if (step == 2) {
          fused.set_lr(0.01);
          dynamic_cast<torch::optim::AdamWOptions&>(theirs.param_groups()[0].options()).lr(0.01);
        }
        fused.step();
        theirs.step();
        fused.zero_grad(/*set_to_none=*/step % 2 == 0);
        if (step % 2 == 0) {
          theirs.zero_grad();
        } else {
          theirs.zero_grad(/*set_to_none=*/false);
        }
      }
      CHECK(counter.total() == 0);
      for (std::size_t i = 0; i < pairs.size(); ++i) {
        CAPTURE(i);
        const at::Tensor got = pairs[i].ours.detach();
        CHECK(close(is_dtensor(got) ? full_tensor(got) : got, pairs[i].plain.detach(), limit));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("FusedAdamW refuses what it cannot update", {1, 2}) {
  const at::Tensor x = leaf(sample({3}));
  check_refused([&] { FusedAdamW({x, x}); }, "parameter 1 is listed twice; list it once");
  check_refused([&] { FusedAdamW({at::Tensor()}); }, "parameter 0 is undefined");
  check_refused([&] { FusedAdamW({x * 2}); }, "parameter 0 is the result of an operator; give a leaf");
  check_refused([&] { FusedAdamW({x}, {.lr = -1}); }, "lr is -1; give a number of 0 or more");
  check_refused([&] { FusedAdamW({x}, {.beta2 = 1}); }, "beta2 is 1; give a number from 0 to less than 1");
  FusedAdamW good({x});
  check_refused([&] { good.set_lr(-0.5); }, "lr is -0.5");
}
