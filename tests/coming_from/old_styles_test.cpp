// Tests the styles of PyTorch 2.0 with their functions before and after a module, against one process.

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/linear.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/pairwise.h"
#include "tessera/styles/hooks.h"
#include "tessera/styles/parallel_styles.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct HookedLinearImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
};
TESSERA_MODULE(HookedLinear);

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    up = register_module("up", HookedLinear(10, 24));
    down = register_module("down", HookedLinear(24, 12));
    to(at::kDouble);
    const c10::AutoGradMode none(false);
    int64_t seed = 5;
    for (const at::Tensor& each : parameters()) at::Tensor(each).copy_(sample(each.sizes(), ++seed));
  }
  at::Tensor forward(const at::Tensor& x) { return down->forward(up->forward(x).relu()); }
  HookedLinear up = nullptr, down = nullptr;
};
TORCH_MODULE(Mlp);

// Compares the plan with one process: where `sequence` is set, `x` and the output are sharded along dimension 0.
template <class PlanOrStyle>
void check_plan(const PlanOrStyle& plan, bool sequence, const DeviceMesh& mesh) {
  Mlp model, one;
  auto tp = parallelize_module(model, mesh, plan);
  const at::Tensor x = sample({2 * mesh.size(), 10});
  const Placements lies = {sequence ? Shard(0) : Replicate()};
  const at::Tensor got = tp(piece_of(x, mesh, lies)), want = one->forward(x);
  REQUIRE_FALSE(is_dtensor(got));
  CHECK(close(got.detach(), piece_of(want.detach(), mesh, lies)));
  const at::Tensor g = sample(want.sizes(), 2);
  want.backward(g);
  got.backward(piece_of(g, mesh, lies));
  for (std::size_t i = 0; i < one->parameters().size(); ++i) {
    CHECK(close(full_tensor(model->parameters()[i].grad()), one->parameters()[i].grad()));
  }
}

at::Tensor last_dim(const at::Tensor& x, const MaybeMesh& mesh) { return make_input_shard_1d_last_dim(x, mesh); }

}  // namespace

TESSERA_RANKS_TEST_CASE("PairwiseParallel, and the same by its two styles and what they prepared", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  check_plan(PairwiseParallel(), false, mesh);
  check_plan(ParallelPlan{{"up", Prepared(ColwiseParallel(), make_input_replicate_1d)},
                          {"down", Prepared(RowwiseParallel(), nullptr, make_output_tensor)}},
             false, mesh);
  check_plan(ParallelPlan{{"up", Prepared(ColwiseParallel(), make_input_replicate_1d, make_sharded_output_tensor)},
                          {"down", Prepared(RowwiseParallel(), last_dim, make_output_tensor)}},
             false, mesh);
}

TESSERA_RANKS_TEST_CASE("SequenceParallel in its old meaning, and the same by two styles", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  check_plan(PairwiseParallel(/*sequence=*/true), true, mesh);
  check_plan(ParallelPlan{{"up", Prepared(ColwiseParallel(), make_input_reshard_replicate)},
                          {"down", Prepared(RowwiseParallel(), nullptr, make_output_reshard_tensor)}},
             true, mesh);
}
