// Checks that norms under SequenceParallel, and a convolution under a contract of the user's own, give the value and
// the gradients of one process, and counts their collectives.

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ops/rms_norm.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/normalization.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/tp_line.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

struct StyledRmsNormImpl : torch::nn::Module {
  StyledRmsNormImpl() : weight(register_parameter("weight", at::ones({6}))) {}
  at::Tensor forward(const at::Tensor& x) { return at::rms_norm(x, {6}, weight, 1e-5); }
  at::Tensor weight;
};
TORCH_MODULE(StyledRmsNorm);

// Cuts a convolution by its output channels.
struct ByChannels : ParallelStyle {
  void apply(ApplyContext& context) const override {
    context.place("weight", Shard(0));
    context.place("bias", Shard(0));
    context.contract("weight", {.operators = {"conv2d"},
                                .input = Replicate(),
                                .desired = Replicate(),
                                .output = Shard(1),
                                .use_local_output = false});
  }
  std::string name() const override { return "ByChannels"; }
};

// Compares a layer under `style`, whose input is cut as `input` says and which gives a result that is cut as `output`
// says, with the same layer in one process. `sent` says how many collectives its forward needs.
template <class Layer>
void check_layer(const Layer& made, const Layer& reference, const Style& style, const at::Tensor& x,
                 const Placement& input, const Placement& output, int64_t sent) {
  const DeviceMesh mesh = tp_line();
  Layer layer = made, one = reference;
  fill(*layer);
  fill(*one);
  parallelize_module(layer, mesh, style);
  const at::Tensor want_x = leaf(x), got_x = leaf(spread(x, mesh, {input}));
  const at::Tensor want = one->forward(want_x), weights = numbers(want.sizes().vec(), 5);
  const CommCounter counter(mesh);
  const at::Tensor got = layer->forward(got_x);
  CHECK(counter.total() == (world_size() == 1 ? 0 : sent));
  REQUIRE(is_dtensor(got));
  CHECK(placements_of(got) == Placements{output});
  CHECK(difference(got, want) <= 1e-12);
  (want * weights).sum().backward();
  (got * spread(weights, mesh, {output})).sum().backward();
  CHECK(placements_of(got_x.grad()) == Placements{input});
  CHECK(difference(got_x.grad(), want_x.grad()) <= 1e-12);
  check_parameters(*layer, *one, /*gradients=*/true, 1e-12);
}

torch::nn::GroupNorm group_norm() { return torch::nn::GroupNorm(torch::nn::GroupNormOptions(2, 4)); }
torch::nn::Conv2d convolution() { return torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 5, 3).padding(1)); }

}  // namespace

TESSERA_RANKS_TEST_CASE("group_norm and rms_norm under SequenceParallel equal one process", {1, 2, 3, 4}) {
  const at::Tensor x = numbers({5, 4, 7});
  check_layer(group_norm(), group_norm(), SequenceParallel(0), x, Shard(0), Shard(0), 0);
  check_layer(StyledRmsNorm(), StyledRmsNorm(), SequenceParallel(1), numbers({2, 5, 6}), Shard(1), Shard(1), 0);
  check_layer(StyledRmsNorm(), StyledRmsNorm(), SequenceParallel(0), numbers({3, 6}), Shard(0), Shard(0), 0);
}

TESSERA_RANKS_TEST_CASE("group_norm under SequenceParallel along a dimension that it reduces is cut along the batch",
                        {1, 2, 3, 4}) {
  check_layer(group_norm(), group_norm(), SequenceParallel(2), numbers({5, 4, 7}), Shard(2), Shard(2),
              2);  // the input goes to the batch, and the result comes back
}

TESSERA_RANKS_TEST_CASE("a convolution under a contract by channels equals one process", {1, 2, 3, 4}) {
  check_layer(convolution(), convolution(), ByChannels(), numbers({2, 2, 4, 4}), Replicate(), Shard(1), 0);
}
