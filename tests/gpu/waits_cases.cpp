// Counts what waits for the GPU in a step of training, and captures a step in a CUDA graph.

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <doctest/doctest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/adamw.h>

#include "tessera/dtensor/clip_grad_norm.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/fused_adamw.h"
#include "tessera/dtensor/random.h"
#include "tessera/layers/sharded_embedding.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/gpu/api_calls.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/block_plans.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/tp_line.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

// Is called at the beginning of each part of a step.
using Enter = std::function<void(const char* part)>;

// Runs ten equal steps, the parts of the tenth each under a counter, and returns what waited in them.
std::string waits_of(const std::function<void(const Enter& enter)>& step) {
  std::string out;
  for (int i = 0; i < 9; ++i) step([](const char*) {});
  c10::impl::VirtualGuardImpl(device().type()).synchronizeDevice(0);
  std::unique_ptr<WaitCounter> counter;
  const char* part = nullptr;
  const auto enter = [&](const char* next) {
    if (counter) {
      const std::string text = counter->text();
      if (!text.empty()) out += std::string(part) + ":\n" + text;
      counter.reset();
    }
    part = next;
    if (next != nullptr) counter = std::make_unique<WaitCounter>();
  };
  step(enter);
  enter(nullptr);
  return out;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("what waits for the GPU is counted, with the operator that did", {1}) {
  const at::Tensor x = at::ones({3}, on(at::kFloat));
  const std::string waited = waits_of([&](const Enter& enter) {
    enter("item");
    (void)x.sum().item<float>();
    enter("a copy to the host");
    (void)x.cpu();
    enter("nothing");
    (void)(x + 1);
  });
  CAPTURE(waited);
  CHECK(waited.find("item:\n") != std::string::npos);
  CHECK(waited.find("aten::_local_scalar_dense") != std::string::npos);
  CHECK(waited.find("a copy to the host:\n") != std::string::npos);
  CHECK(waited.find("nothing:\n") == std::string::npos);
}

TESSERA_RANKS_TEST_CASE("nothing waits for the GPU in the tenth step of a block's training", {1}) {
  const DeviceMesh mesh = tp_line();
  Block block(64, 4, 128);
  fill(*block, at::kFloat);
  auto tp = parallelize_module(block, mesh, kBlock);
  torch::optim::AdamW optimizer(block->parameters());
  const at::Tensor x = numbers({2, 16, 64}, 1, at::kFloat);
  const std::string waited = waits_of([&](const Enter& enter) {
    enter("zero_grad");
    optimizer.zero_grad();
    enter("forward");
    const at::Tensor loss = tp(x).square().mean();
    enter("backward");
    loss.backward();
    enter("clipping");
    clip_grad_norm_on_device_(block->parameters(), 1.0);
    enter("AdamW");
    optimizer.step();
  });
  CAPTURE(waited);
  CHECK(waited == "");
}

TESSERA_RANKS_TEST_CASE("nothing waits for the GPU in an embedding, dropout and cross entropy", {1}) {
  const DeviceMesh mesh = tp_line();
  torch::nn::Embedding table(50, 16);
  fill(*table, at::kFloat);
  auto tp = parallelize_module(table, mesh, {{"", RowwiseParallel()}});
  const at::Tensor ids = at::arange(24, on(at::kLong)).remainder(50);
  const at::Tensor plain = at::ones({50, 16}, on(at::kFloat)).requires_grad_();
  const at::Tensor spread_ids = distribute_tensor(ids, mesh, {Replicate()});
  const std::string waited = waits_of([&](const Enter& enter) {
    enter("embedding");
    at::Tensor y = tp(ids);
    enter("dropout");
    y = at::dropout(y, 0.1, true);
    enter("embedding of a plain table");
    sharded_embedding(ids, plain, mesh, {.num_embeddings = 50}).sum().backward();
    enter("linear");
    const at::Tensor logits = at::matmul(y, table->weight.t());
    enter("one_hot");
    (void)at::one_hot(spread_ids, 50);
    enter("cross entropy");
    const at::Tensor loss = torch::nn::functional::cross_entropy(logits, spread_ids);
    enter("backward");
    loss.backward();
  });
  CAPTURE(waited);
  CHECK(waited == "");
}

namespace {

// Compares 20 replays of a graph that holds one step with as many eager steps, bit by bit.
void check_captured_step(bool clips) {
  const DeviceMesh mesh = tp_line();
  const auto make = [&] {
    Block block(64, 4, 128);
    fill(*block, at::kFloat);
    return block;
  };
  Block eager = make(), captured = make();
  auto eager_tp = parallelize_module(eager, mesh, kBlock);
  auto captured_tp = parallelize_module(captured, mesh, kBlock);
  const at::Tensor x = numbers({2, 16, 64}, 1, at::kFloat);
  FusedAdamW of_eager(eager->parameters(), {.lr = 1e-2}), of_captured(captured->parameters(), {.lr = 1e-2});
  const auto step = [&](auto& tp, FusedAdamW& optimizer) {
    optimizer.zero_grad(/*set_to_none=*/false);
    at::dropout(tp(x), 0.1, true).square().mean().backward();
    if (clips) clip_grad_norm_on_device_(tp->parameters(), 0.1);
    optimizer.step();
  };
  // Three steps of warm-up on a stream of their own, as a capture needs.
  const c10::impl::VirtualGuardImpl gpu(device().type());
  const c10::Stream side = gpu.getStreamFromGlobalPool(mesh.device());
  gpu.synchronizeDevice(0);
  at::cuda::CUDAGraph graph;
  std::optional<CapturedDraws> draws;
  manual_seed(3, *world());
  {
    const c10::StreamGuard guard(side);
    for (int i = 0; i < 3; ++i) step(captured_tp, of_captured);
    gpu.synchronizeDevice(0);
    draws.emplace(*world(), mesh.device());
    graph.capture_begin();
    step(captured_tp, of_captured);
    graph.capture_end();
    draws->end();
  }
  manual_seed(3, *world());
  for (int i = 0; i < 3; ++i) step(eager_tp, of_eager);
  RandomState after_warm_up = world()->random_state(), of_graph = after_warm_up;
  for (int i = 0; i < 20; ++i) {
    world()->random_state() = of_graph;
    draws->before_replay();
    of_graph = world()->random_state();
    world()->random_state() = after_warm_up;
    of_eager.set_lr(1e-2 / (1 + i));
    of_captured.set_lr(1e-2 / (1 + i));
    graph.replay();
    step(eager_tp, of_eager);
    after_warm_up = world()->random_state();
  }
  gpu.synchronizeDevice(0);
  const std::vector<at::Tensor> got = captured->parameters(), want = eager->parameters();
  for (std::size_t i = 0; i < want.size(); ++i) {
    CAPTURE(i);
    CHECK(to_local(want[i].detach()).equal(to_local(got[i].detach())));
  }
}

}  // namespace

TESSERA_RANKS_TEST_CASE("a step of a block with dropout on one rank is captured in a CUDA graph", {1}) {
  check_captured_step(/*clips=*/false);
}

TESSERA_RANKS_TEST_CASE("a captured step may clip its gradients", {1}) { check_captured_step(/*clips=*/true); }
