// Unmodified torch::nn code under styles against one process: outputs, gradients, and parameters after steps.

#include <optional>
#include <string>
#include <vector>

#include <ATen/ops/arange.h>
#include <c10/util/Logging.h>  // defines a CHECK of its own, so it comes before doctest
#include <doctest/doctest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/comm_counter.h"
#include "tessera/placement/layout.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/blocks.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

struct Tolerance {
  at::ScalarType dtype;
  double limit;
};
const std::vector<Tolerance> kTolerances = {{at::kDouble, 1e-12}, {at::kFloat, 1e-5}};

const ParallelPlan kMlp = {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};
const ParallelPlan kAttention = {{"w[qkv]", ColwiseParallel()}, {"wo", RowwiseParallel()}};
const ParallelPlan kBlock = {{"attn.w[qkv]", ColwiseParallel()},
                             {"attn.wo", RowwiseParallel()},
                             {"mlp.up", ColwiseParallel()},
                             {"mlp.down", RowwiseParallel()}};
// The residual stream cut along the sequence.
const ParallelPlan kSequence = {{"norm?", SequenceParallel()},
                                {"attn.w[qkv]", ColwiseParallel({.input_layouts = Shard(1)})},
                                {"attn.wo", RowwiseParallel({.output_layouts = Shard(1)})},
                                {"mlp.up", ColwiseParallel({.input_layouts = Shard(1)})},
                                {"mlp.down", RowwiseParallel({.output_layouts = Shard(1)})}};

// How the input of a step enters: as it is on one mesh dimension, as this rank's piece of the batch on two.
struct Feed {
  DeviceMesh mesh;
  Placements placements;

  at::Tensor operator()(const at::Tensor& x) const {
    if (mesh.ndim() == 1 && all_replicate(placements)) return x.detach().clone().set_requires_grad(true);
    at::Tensor piece = x.detach().clone();
    const std::vector<Range> box = local_box(x.sizes(), placements, mesh.mesh().shape(), *mesh.coordinate());
    for (int64_t dim = 0; dim < x.dim(); ++dim) {
      piece = piece.narrow(dim, box[static_cast<std::size_t>(dim)].offset, box[static_cast<std::size_t>(dim)].size);
    }
    FromLocalOptions options;
    options.shape = x.sizes().vec();
    return from_local(piece.contiguous().detach(), mesh, placements, options).detach().set_requires_grad(true);
  }
};

DeviceMesh line() { return init_device_mesh("cpu", {world_size()}, {"tp"}, world()); }
DeviceMesh grid() { return init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world()); }

// One step forward and backward of `got` and `want` on the same input; compares outputs and all gradients.
template <class Module, class Parallel>
void step(Module& want, Parallel& got, const Feed& feed, const at::Tensor& x, double limit) {
  at::Tensor plain = x.detach().clone().set_requires_grad(true);
  const at::Tensor expected = want->forward(plain);
  expected.square().mean().backward();
  at::Tensor mine = feed(x);
  const at::Tensor y = got(mine);
  CHECK(difference(y, expected) <= limit);
  y.square().mean().backward();
  CHECK(difference(mine.grad(), plain.grad()) <= limit);
}

// Three steps of SGD with momentum, compared after each backward and at the end.
template <class Make>
void train(const Make& make, const ParallelPlan& plan, const Feed& feed, const std::vector<int64_t>& shape,
           const std::string& zero_gradient = "-") {
  for (const Tolerance& t : kTolerances) {
    CAPTURE(c10::toString(t.dtype));
    auto reference = make(), module = make();
    fill(*reference, t.dtype);
    fill(*module, t.dtype);
    auto tp = parallelize_module(module, feed.mesh, plan);
    torch::optim::SGD ours(module->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    torch::optim::SGD theirs(reference->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    for (uint64_t i = 0; i < 3; ++i) {
      CAPTURE(i);
      ours.zero_grad();
      theirs.zero_grad();
      step(reference, tp, feed, numbers(shape, 10 + i, t.dtype), t.limit);
      check_parameters(*module, *reference, /*gradients=*/true, t.limit, zero_gradient);
      ours.step();
      theirs.step();
    }
    check_parameters(*module, *reference, /*gradients=*/false, t.limit);
  }
}

// The gradient of a key's bias is zero but for rounding: it shifts all scores of a row alike.
constexpr const char* kKeyBias = "wk.bias";

Mlp make_mlp() { return Mlp(10, 16, 12); }
Attention make_attention() { return Attention(24, 12); }
Block make_block() { return Block(24, 12, 32); }

}  // namespace

TESSERA_RANKS_TEST_CASE("an MLP of uneven shards equals one process, 2-D and 3-D", {1, 2, 3, 4}) {
  const Feed whole{line(), {Replicate()}};
  train(make_mlp, kMlp, whole, {6, 10});
  train(make_mlp, kMlp, whole, {2, 3, 10});
  train([] { return Mlp(10, 16, 12, /*bias=*/false); }, kMlp, whole, {2, 3, 10});
}

TESSERA_RANKS_TEST_CASE("an attention block with separate q, k, v, heads sharded, equals one process", {1, 2, 3, 4}) {
  train(make_attention, kAttention, {line(), {Replicate()}}, {2, 5, 24}, kKeyBias);
}

TESSERA_RANKS_TEST_CASE("a transformer block equals one process", {1, 2, 3, 4}) {
  train(make_block, kBlock, {line(), {Replicate()}}, {2, 5, 24}, kKeyBias);
}

TESSERA_RANKS_TEST_CASE("a transformer block cut along an uneven sequence equals one process", {1, 2, 3, 4}) {
  train(make_block, kSequence, {line(), {Shard(1)}}, {2, 5, 24}, kKeyBias);
}

TESSERA_RANKS_TEST_CASE("data and tensor parallel: each coordinate its piece of the batch, uneven once", {4}) {
  for (const int64_t batch : {4, 3}) {
    CAPTURE(batch);
    const Feed pieces{grid(), {Shard(0), Replicate()}};
    train(make_mlp, kMlp, pieces, {batch, 10});
    train(make_attention, kAttention, pieces, {batch, 5, 24}, kKeyBias);
    train(make_block, kBlock, pieces, {batch, 5, 24}, kKeyBias);
    train(make_block, kSequence, {grid(), {Shard(0), Shard(1)}}, {batch, 5, 24}, kKeyBias);
  }
}

TESSERA_RANKS_TEST_CASE("AdamW: three steps equal one process but where the true gradient is zero", {2, 4}) {
  const Feed whole{line(), {Replicate()}};
  for (const Tolerance& t : kTolerances) {
    CAPTURE(c10::toString(t.dtype));
    Block reference = make_block(), module = make_block();
    fill(*reference, t.dtype);
    fill(*module, t.dtype);
    auto tp = parallelize_module(module, whole.mesh, kBlock);
    torch::optim::AdamW ours(module->parameters(), torch::optim::AdamWOptions(1e-2));
    torch::optim::AdamW theirs(reference->parameters(), torch::optim::AdamWOptions(1e-2));
    for (uint64_t i = 0; i < 3; ++i) {
      ours.zero_grad();
      theirs.zero_grad();
      step(reference, tp, whole, numbers({2, 5, 24}, 10 + i, t.dtype), t.limit);
      ours.step();
      theirs.step();
    }
    check_parameters(*module, *reference, /*gradients=*/false, t.limit, kKeyBias);
  }
}

TESSERA_RANKS_TEST_CASE("collectives of a block under Strict: two all-reduces forward, charged to their weights", {2, 4}) {
  const DeviceMesh mesh = line();
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

// The logits' weight is the embedding's.
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

TESSERA_RANKS_TEST_CASE("a weight tied between embedding and head: values, and one gradient for both uses", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  LanguageModel reference, module;
  fill(*reference);
  fill(*module);
  auto tp = parallelize_module(module, mesh,
                               {{"tok", RowwiseParallel()},
                                {"mlp.up", ColwiseParallel()},
                                {"mlp.down", RowwiseParallel()},
                                {"head", ColwiseParallel()}});
  CHECK(module->tok->weight.is_same(module->head->weight));
  const at::Tensor ids = at::arange(12, at::kLong).view({3, 4});
  const at::Tensor want = reference->forward(ids), got = tp(ids);
  CHECK(placements_of(got) == Placements{Shard(2)});
  CHECK(difference(got, want) <= 1e-12);
  want.square().sum().backward();
  got.square().sum().backward();
  CHECK(placements_of(module->tok->weight.grad()) == Placements{Shard(0)});
  CHECK(difference(module->tok->weight.grad(), reference->tok->weight.grad()) <= 1e-12);
}

TESSERA_RANKS_TEST_CASE("values come from the source rank alone, and none needs no communication", {2, 4}) {
  const DeviceMesh mesh = line();
  Mlp module(4, 6, 4);
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
  for (const at::Tensor& p : module->parameters()) CHECK((whole(p) == static_cast<double>(world_size())).all().item<bool>());
  counter.reset();
  parallelize_module(other, mesh, kMlp, {.src_rank = kNoSource});
  CHECK(counter.total() == 0);
}
