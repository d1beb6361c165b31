// Tests unmodified torch::nn code under styles against one process: outputs, gradients, and parameters after steps.

#include <ATen/ops/arange.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/embedding.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/block_plans.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/training/training.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

const ParallelPlan kMlp = {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};
const ParallelPlan kAttention = {{"w[qkv]", ColwiseParallel()}, {"wo", RowwiseParallel()}};
// The residual stream is sharded along the sequence.
const ParallelPlan kSequence = {{"norm?", SequenceParallel()},
                                {"attn.w[qkv]", ColwiseParallel({.input_layouts = Shard(1)})},
                                {"attn.wo", RowwiseParallel({.output_layouts = Shard(1)})},
                                {"mlp.up", ColwiseParallel({.input_layouts = Shard(1)})},
                                {"mlp.down", RowwiseParallel({.output_layouts = Shard(1)})}};

// The gradient of a key's bias is zero except for rounding: it shifts all scores of a row equally.
const Rows kKeyBias = {"wk.bias"};

Mlp make_mlp() { return Mlp(10, 16, 12); }
Attention make_attention() { return Attention(24, 12); }
Block make_block() { return Block(24, 12, 32); }

}  // namespace

TESSERA_RANKS_TEST_CASE("an MLP of uneven shards equals one process, 2-D and 3-D", {1, 2, 3, 4}) {
  const Feed whole{tp_line(), {Replicate()}};
  train_sgd(make_mlp, kMlp, whole, {6, 10});
  train_sgd(make_mlp, kMlp, whole, {2, 3, 10});
  train_sgd([] { return Mlp(10, 16, 12, /*bias=*/false); }, kMlp, whole, {2, 3, 10});
}

TESSERA_RANKS_TEST_CASE("an attention block with separate q, k, v, heads sharded, equals one process", {1, 2, 3, 4}) {
  train_sgd(make_attention, kAttention, {tp_line(), {Replicate()}}, {2, 5, 24}, kKeyBias);
}

TESSERA_RANKS_TEST_CASE("a transformer block equals one process", {1, 2, 3, 4}) {
  train_sgd(make_block, kBlock, {tp_line(), {Replicate()}}, {2, 5, 24}, kKeyBias);
}

TESSERA_RANKS_TEST_CASE("a transformer block cut along an uneven sequence equals one process", {1, 2, 3, 4}) {
  train_sgd(make_block, kSequence, {tp_line(), {Shard(1)}}, {2, 5, 24}, kKeyBias);
}

TESSERA_RANKS_TEST_CASE("data and tensor parallel: each coordinate its piece of the batch, uneven once", {4}) {
  for (const int64_t batch : {4, 3}) {
    CAPTURE(batch);
    const Feed pieces{grid(), {Shard(0), Replicate()}};
    train_sgd(make_mlp, kMlp, pieces, {batch, 10});
    train_sgd(make_attention, kAttention, pieces, {batch, 5, 24}, kKeyBias);
    train_sgd(make_block, kBlock, pieces, {batch, 5, 24}, kKeyBias);
    train_sgd(make_block, kSequence, {grid(), {Shard(0), Shard(1)}}, {batch, 5, 24}, kKeyBias);
  }
}

TESSERA_RANKS_TEST_CASE("AdamW: three steps equal one process but where the true gradient is zero", {1, 2, 3, 4}) {
  train_adamw(make_mlp, kMlp, {tp_line(), {Replicate()}}, {6, 10});
  train_adamw(make_attention, kAttention, {tp_line(), {Replicate()}}, {2, 5, 24}, kKeyBias);
  train_adamw(make_block, kBlock, {tp_line(), {Replicate()}}, {2, 5, 24}, kKeyBias);
  train_adamw(make_block, kSequence, {tp_line(), {Shard(1)}}, {2, 5, 24}, kKeyBias);
}

TESSERA_RANKS_TEST_CASE("AdamW on data x tensor", {4}) {
  train_adamw(make_mlp, kMlp, {grid(), {Shard(0), Replicate()}}, {3, 10});
  train_adamw(make_block, kBlock, {grid(), {Shard(0), Replicate()}}, {3, 5, 24}, kKeyBias);
}

TESSERA_RANKS_TEST_CASE("collectives of a block under Strict: two all-reduces forward, charged to their weights",
                        {2, 4}) {
  const DeviceMesh mesh = tp_line();
  Block block = make_block();
  fill(*block);
  auto tp = parallelize_module(block, mesh, kBlock);
  const at::Tensor x = numbers({2, 5, 24});
  CommCounter counter(mesh);
  {
    const Strict strict;
    const at::NoGradGuard no_grad;
    tp(x);
  }
  CAPTURE(counter.to_string());
  CHECK(counter.total() == 2);
  CHECK(counter.count("all_reduce") == 2);
  CHECK(counter.count_by_path("attn.wo.weight") == 1);
  CHECK(counter.count_by_path("mlp.down.weight") == 1);
}

namespace {

// The weight of the logits is the embedding's.
struct LanguageModelImpl : torch::nn::Module {
  LanguageModelImpl()
      : tok(register_module("tok", torch::nn::Embedding(13, 8))), mlp(register_module("mlp", Mlp(8, 12, 8))) {
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(8, 13).bias(false)));
    head->weight = tok->weight;
    head->named_parameters(false)["weight"].set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& ids) { return head(mlp(tok(ids))); }
  torch::nn::Embedding tok;
  Mlp mlp;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(LanguageModel);

}  // namespace

TESSERA_RANKS_TEST_CASE("a weight tied between embedding and head: values, and one gradient for both uses",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = tp_line();
  LanguageModel reference, module;
  fill(*reference);
  fill(*module);
  auto tp = parallelize_module(module, mesh,
                               {{"tok", RowwiseParallel()},
                                {"mlp.up", ColwiseParallel()},
                                {"mlp.down", RowwiseParallel()},
                                {"head", ColwiseParallel()}});
  CHECK(module->tok->weight.is_same(module->head->weight));
  const at::Tensor ids = at::arange(12, on(at::kLong)).view({3, 4});
  const at::Tensor want = reference->forward(ids), got = tp(ids);
  CHECK(placements_of(got) == Placements{Shard(2)});
  CHECK(difference(got, want) <= 1e-12);
  want.square().sum().backward();
  got.square().sum().backward();
  CHECK(placements_of(module->tok->weight.grad()) == Placements{Shard(0)});
  CHECK(difference(module->tok->weight.grad(), reference->tok->weight.grad()) <= 1e-12);
}

TESSERA_RANKS_TEST_CASE("values come from the source rank alone, and none needs no communication", {2, 4}) {
  const DeviceMesh mesh = tp_line();
  Mlp module(4, 6, 4);
  module->to(device());
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : module->parameters()) p.fill_(static_cast<double>(rank() + 1));
  }
  Mlp other(4, 6, 4);
  fill(*other, at::kFloat);
  CommCounter counter(mesh);
  parallelize_module(module, mesh, kMlp, {.src_rank = world_size() - 1});
  CHECK(counter.count("scatter") == 3);
  CHECK(counter.count("broadcast") == 1);
  for (const at::Tensor& p : module->parameters())
    CHECK((whole_value(p) == static_cast<double>(world_size())).all().item<bool>());
  counter.reset();
  parallelize_module(other, mesh, kMlp, {.src_rank = kNoSource});
  CHECK(counter.total() == 0);
}
