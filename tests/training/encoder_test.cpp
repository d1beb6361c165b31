// Tests torch::nn::TransformerEncoder under styles against one process.

#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/training/training.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using torch::nn::TransformerEncoder;

// Feed-forward and norms have styles; attention stays replicated. LibTorch takes the sequence first.
const ParallelPlan kPlan = {{"layers.*.linear1", ColwiseParallel()},
                            {"layers.*.linear2", RowwiseParallel()},
                            {"layers.*.norm?", SequenceParallel(0)}};

TransformerEncoder make(double dropout) {
  const auto layer = torch::nn::TransformerEncoderLayerOptions(kWidth, 4).dim_feedforward(40).dropout(dropout);
  return TransformerEncoder(torch::nn::TransformerEncoderOptions(layer, 2));
}

TransformerEncoder make_encoder() { return make(0.0); }

// The key's third of the packed bias shifts all scores of a row equally, so its gradient is zero except for rounding.
const Rows kEncoderKeyBias = {"self_attn.in_proj_bias", kWidth, 2 * kWidth};

}  // namespace

TESSERA_RANKS_TEST_CASE("TransformerEncoder of 2 layers equals one process: outputs, gradients, three steps of SGD",
                        {1, 2, 3, 4}) {
  train_sgd(make_encoder, kPlan, {tp_line(), {Replicate()}}, {7, 3, kWidth});
  train_sgd(make_encoder, kPlan, {tp_line(), {Shard(0)}}, {7, 3, kWidth});
}

TESSERA_RANKS_TEST_CASE("TransformerEncoder: three steps of AdamW, but where the true gradient is zero", {1, 2, 3, 4}) {
  train_adamw(make_encoder, kPlan, {tp_line(), {Replicate()}}, {7, 3, kWidth}, kEncoderKeyBias);
  train_adamw(make_encoder, kPlan, {tp_line(), {Shard(0)}}, {7, 3, kWidth}, kEncoderKeyBias);
}

TESSERA_RANKS_TEST_CASE("TransformerEncoder on data x tensor: each coordinate its piece of the batch, uneven once",
                        {4}) {
  for (const int64_t batch : {4, 3}) {
    CAPTURE(batch);
    const Feed pieces{grid(), {Shard(1), Replicate()}};
    train_sgd(make_encoder, kPlan, pieces, {7, batch, kWidth});
    train_adamw(make_encoder, kPlan, pieces, {7, batch, kWidth}, kEncoderKeyBias);
  }
}

TESSERA_RANKS_TEST_CASE("TransformerEncoder with dropout: replicas agree on every rank, shards draw differently",
                        {2, 4}) {
  const DeviceMesh mesh = tp_line();
  TransformerEncoder encoder = make(0.5);
  fill(*encoder);
  auto tp = parallelize_module(encoder, mesh, kPlan);
  manual_seed(11, mesh.world());
  const at::Tensor x = numbers({4 * world_size(), 2, kWidth});
  // The output is replicated or sharded; as a whole, every rank must have the same values.
  const at::Tensor y = full_tensor(tp(Feed{mesh, {Replicate()}}(x)));
  FromLocalOptions check;
  check.check = true;
  CHECK_NOTHROW(from_local(y.detach(), mesh, {Replicate()}, check));
  // Every rank has ones of the same shape: the elements that dropout keeps show whether ranks draw differently.
  const at::Tensor ones = Feed{mesh, {Shard(0)}}(at::ones({8 * world_size(), 8}, on(at::kDouble)));
  const at::Tensor drawn = full_tensor(at::dropout(ones, 0.5, true)).detach();
  CHECK_FALSE(at::equal(drawn.narrow(0, 0, 8), drawn.narrow(0, 8, 8)));
  // The same seed draws the same numbers.
  manual_seed(11, mesh.world());
  CHECK(at::equal(full_tensor(tp(Feed{mesh, {Replicate()}}(x))), y));
}
