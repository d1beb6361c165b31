// LibTorch's own torch::nn::TransformerEncoder under styles against one process.

#include <string>
#include <vector>

#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/optim/sgd.h>

#include "tessera/dtensor/dispatch/random.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/placement/layout.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/blocks.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using torch::nn::TransformerEncoder;

constexpr int64_t kWidth = 24;

// Feed-forward and norms styled; attention, packed in one projection, stays replicated. Sequence first, as LibTorch has it.
const ParallelPlan kPlan = {{"layers.*.linear1", ColwiseParallel()},
                            {"layers.*.linear2", RowwiseParallel()},
                            {"layers.*.norm?", SequenceParallel(0)}};

TransformerEncoder make(double dropout, at::ScalarType dtype) {
  torch::manual_seed(3);
  const auto layer = torch::nn::TransformerEncoderLayerOptions(kWidth, 4).dim_feedforward(40).dropout(dropout);
  TransformerEncoder encoder(torch::nn::TransformerEncoderOptions(layer, 2));
  fill(*encoder, dtype);
  return encoder;
}

DeviceMesh line() { return init_device_mesh("cpu", {world_size()}, {"tp"}, world()); }
DeviceMesh grid() { return init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world()); }

at::Tensor piece(const at::Tensor& x, const DeviceMesh& mesh, const Placements& placements) {
  FromLocalOptions options;
  options.shape = x.sizes().vec();
  at::Tensor part = x;
  const auto box = local_box(x.sizes(), placements, mesh.mesh().shape(), *mesh.coordinate());
  for (std::size_t d = 0; d < box.size(); ++d) part = part.narrow(static_cast<int64_t>(d), box[d].offset, box[d].size);
  return from_local(part.contiguous(), mesh, placements, options).detach().set_requires_grad(true);
}

// Three steps of SGD with momentum: outputs, input gradients, all gradients and the parameters after them.
void train(const DeviceMesh& mesh, const Placements& input, int64_t batch, at::ScalarType dtype, double limit) {
  TransformerEncoder want = make(0.0, dtype), got = make(0.0, dtype);
  auto tp = parallelize_module(got, mesh, kPlan);
  torch::optim::SGD ours(got->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  torch::optim::SGD theirs(want->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  for (uint64_t i = 0; i < 3; ++i) {
    CAPTURE(i);
    ours.zero_grad();
    theirs.zero_grad();
    const at::Tensor x = numbers({7, batch, kWidth}, 20 + i, dtype);
    at::Tensor plain = x.clone().set_requires_grad(true);
    at::Tensor mine = piece(x, mesh, input);
    const at::Tensor expected = want(plain);
    const at::Tensor y = tp(mine);
    CHECK(difference(y, expected) <= limit);
    expected.square().mean().backward();
    y.square().mean().backward();
    CHECK(difference(mine.grad(), plain.grad()) <= limit);
    check_parameters(*got, *want, /*gradients=*/true, limit);
    ours.step();
    theirs.step();
  }
  check_parameters(*got, *want, /*gradients=*/false, limit);
}

}  // namespace

TESSERA_RANKS_TEST_CASE("TransformerEncoder of 2 layers equals one process: outputs, gradients, three steps of SGD",
                        {1, 2, 3, 4}) {
  train(line(), {Replicate()}, 3, at::kDouble, 1e-12);
  train(line(), {Shard(0)}, 3, at::kDouble, 1e-12);
  train(line(), {Replicate()}, 3, at::kFloat, 1e-5);
}

TESSERA_RANKS_TEST_CASE("TransformerEncoder on data x tensor: each coordinate its piece of the batch, uneven once", {4}) {
  for (const int64_t batch : {4, 3}) {
    CAPTURE(batch);
    train(grid(), {Shard(1), Replicate()}, batch, at::kDouble, 1e-12);
    train(grid(), {Shard(1), Replicate()}, batch, at::kFloat, 1e-5);
  }
}

TESSERA_RANKS_TEST_CASE("TransformerEncoder with dropout: replicas agree on every rank, shards draw differently", {2, 4}) {
  const DeviceMesh mesh = line();
  TransformerEncoder encoder = make(0.5, at::kDouble);
  auto tp = parallelize_module(encoder, mesh, kPlan);
  manual_seed(11, mesh.world());
  const at::Tensor x = numbers({4 * world_size(), 2, kWidth});
  // The output is replicated or cut; brought together, every rank must have the same values.
  const at::Tensor y = full_tensor(tp(piece(x, mesh, {Replicate()})));
  FromLocalOptions check;
  check.check = true;
  CHECK_NOTHROW(from_local(y.detach(), mesh, {Replicate()}, check));
  // Ones in equal pieces: what survives dropout tells the draws apart.
  const at::Tensor ones = piece(at::ones({8 * world_size(), 8}, at::kDouble), mesh, {Shard(0)});
  const at::Tensor drawn = full_tensor(at::dropout(ones, 0.5, true)).detach();
  CHECK_FALSE(at::equal(drawn.narrow(0, 0, 8), drawn.narrow(0, 8, 8)));
  // The same seed gives the same draws again.
  manual_seed(11, mesh.world());
  CHECK(at::equal(full_tensor(tp(piece(x, mesh, {Replicate()}))), y));
}
