// Tests parameters that are sharded over the data dimension too (data_placement): training against one process,
// collectives, and memory.

#include <string>
#include <vector>

#include <ATen/ops/arange.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/deferred/peak_memory.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/styles/block_plans.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/fake_mesh.h"
#include "tessera/tests/training/data_placement.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

const ParallelPlan kMlp = {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};

// Uses parameters in every way: rows looked up, norms, products with and without bias, a convolution, a plain
// multiplication, a recurrent layer, and a weight that is used twice.
struct AllKindsImpl : torch::nn::Module {
  AllKindsImpl()
      : tok(register_module("tok", torch::nn::Embedding(13, 8))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})))),
        mlp(register_module("mlp", Mlp(8, 10, 8))),
        conv(register_module("conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(8, 8, 3).padding(1)))),
        gru(register_module("gru", torch::nn::GRUCell(8, 8))),
        scale(register_parameter("scale", torch::ones({8}))) {}
  at::Tensor forward(const at::Tensor& ids) {
    at::Tensor x = norm(tok(ids)) * scale;
    x = x + mlp(x);
    x = x + conv(x.transpose(1, 2)).transpose(1, 2);
    const at::Tensor last = gru(x.select(1, 0), x.select(1, 1));
    return torch::nn::functional::linear(x + last.unsqueeze(1), tok->weight);
  }
  torch::nn::Embedding tok;
  torch::nn::LayerNorm norm;
  Mlp mlp;
  torch::nn::Conv1d conv;
  torch::nn::GRUCell gru;
  at::Tensor scale;
};
TORCH_MODULE(AllKinds);

// Torch's generator belongs to the process: models and inputs are made once, before ranks start.
struct Cases {
  Mlp mlp{10, 16, 12};
  Block block{24, 12, 32};
  AllKinds kinds;
  at::Tensor rows = numbers({5, 10}), sequences = numbers({3, 5, 24});
  at::Tensor ids = at::arange(12, on(at::kLong)).view({4, 3});

  Cases() {
    fill(*mlp);
    fill(*block);
    fill(*kinds);
  }
};

// Returns a copy of `module` whose members share what they share in the original.
template <class Holder>
Holder copy(const Holder& module, Holder fresh) {
  const torch::NoGradGuard no_grad;
  fresh->to(device(), at::kDouble);
  const auto from = module->named_parameters();
  for (auto& item : fresh->named_parameters()) item.value().copy_(from[item.key()]);
  return fresh;
}

const ParallelPlan kKinds = {
    {"tok", RowwiseParallel()}, {"mlp.up", ColwiseParallel()}, {"mlp.down", RowwiseParallel()}};

}  // namespace

TEST_CASE("training equals one process on data x tensor, uneven pieces and more ranks than rows too") {
  const Cases cases;
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{1, 1}, {2, 1}, {1, 2}, {3, 1}, {2, 2}, {4, 1}}) {
    CAPTURE(fmt::format("{} x {}", shape[0], shape[1]));
    run_in_process(shape[0] * shape[1], [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh(device_name(), shape, {"dp", "tp"}, world);
      const auto mlp = [&] { return copy(cases.mlp, Mlp(10, 16, 12)); };
      const auto block = [&] { return copy(cases.block, Block(24, 12, 32)); };
      const auto sgd = torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.1);
      train<torch::optim::SGD>(mlp, kMlp, cases.rows, mesh, sgd, Under::kStrict);
      train<torch::optim::SGD>(mlp, {}, cases.rows, mesh, sgd, Under::kStrict);
      train<torch::optim::SGD>(block, kBlock, cases.sequences, mesh, sgd, Under::kStrictForward);
      train<torch::optim::AdamW>(mlp, kMlp, cases.rows, mesh, torch::optim::AdamWOptions(), Under::kStrict);
    });
  }
}

TEST_CASE("every kind of module that uses parameters, and a weight that is used twice, equals one process") {
  const Cases cases;
  const auto kinds = [&] { return copy(cases.kinds, AllKinds()); };
  const auto sgd = torch::optim::SGDOptions(0.05);
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{2, 1}, {2, 2}, {4, 1}}) {
    CAPTURE(fmt::format("{} x {}", shape[0], shape[1]));
    run_in_process(shape[0] * shape[1], [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh(device_name(), shape, {"dp", "tp"}, world);
      train<torch::optim::SGD>(kinds, {}, cases.ids, mesh, sgd, Under::kStrictForward);
      train<torch::optim::SGD>(kinds, kKinds, cases.ids, mesh, sgd, Under::kStrictForward);
    });
  }
}

namespace {

// Forward uses parts of one parameter.
struct PackedImpl : torch::nn::Module {
  PackedImpl() : weight(register_parameter("weight", torch::zeros({15, 8}))) {}
  at::Tensor forward(const at::Tensor& x) {
    const std::vector<at::Tensor> parts = weight.chunk(3, 0);
    return torch::matmul(x, parts[0].t()) * torch::matmul(x, parts[1].t()) + torch::matmul(x, parts[2].t()) +
           weight[7].narrow(0, 2, 5);
  }
  at::Tensor weight;
};
TORCH_MODULE(Packed);

struct ByRows : ParallelStyle {
  void apply(ApplyContext& context) const override { context.place("weight", Shard(0)); }
  std::string name() const override { return "ByRows"; }
};

}  // namespace

TEST_CASE("parts of a parameter that is cut twice along one dimension") {
  Packed original;
  fill(*original);
  const auto packed = [&] { return copy(original, Packed()); };
  const at::Tensor x = numbers({5, 8});
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{2, 1}, {2, 2}, {4, 1}}) {
    CAPTURE(fmt::format("{} x {}", shape[0], shape[1]));
    run_in_process(shape[0] * shape[1], [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh(device_name(), shape, {"dp", "tp"}, world);
      const auto sgd = torch::optim::SGDOptions(0.05);
      train<torch::optim::SGD>(packed, {}, x, mesh, sgd, Under::kStrictForward);
      train<torch::optim::SGD>(packed, {{"", ByRows()}}, x, mesh, sgd, Under::kNothing);
    });
  }
}

TEST_CASE(
    "collectives of an MLP on 2 x 2: each parameter gathered where it is used, all gradients reduce-scattered at "
    "once") {
  const Cases cases;
  run_in_process(4, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2}, {"dp", "tp"}, world);
    const Mlp module = copy(cases.mlp, Mlp(10, 16, 12));
    auto zero = parallelize_module(module, mesh, kMlp, kZero);
    CHECK(placements_of(module->up->weight) == Placements{Shard(0).ordered(1), Shard(0)});
    CHECK(placements_of(module->up->bias) == Placements{Shard(0).ordered(1), Shard(0)});
    CHECK(placements_of(module->down->weight) == Placements{Shard(0), Shard(1)});
    CHECK(placements_of(module->down->bias) == Placements{Shard(0), Replicate()});
    const at::Tensor x = piece(cases.rows, mesh).set_requires_grad(true);
    CommCounter counter(mesh);
    const at::Tensor loss = zero(x).square().sum();
    CAPTURE(counter.to_string());
    CHECK(counter.count("all_gather") == 4);
    CHECK(counter.count_on("dp") == 4);
    CHECK(counter.count("all_reduce") == 1);
    CHECK(counter.count_on("tp") == 1);
    CHECK(counter.total() == 5);
    for (const char* path : {"up.weight", "up.bias", "down.bias"}) CHECK(counter.count_by_path(path) == 1);
    CHECK(counter.count_by_path("down.weight") == 2);
    counter.reset();
    loss.backward();
    CAPTURE(counter.to_string());
    // Both weights are gathered again, each for its input's gradient; the input's own gradient is reduced over tp.
    CHECK(counter.count("all_gather") == 2);
    CHECK(counter.count("reduce_scatter") == 1);
    CHECK(counter.count_on("dp") == 3);
    CHECK(counter.count_on("tp") == 1);
    // An optimizer's step uses only pieces.
    counter.reset();
    torch::optim::SGD(module->parameters(), torch::optim::SGDOptions(0.1).weight_decay(0.1).momentum(0.9)).step();
    torch::optim::AdamW(module->parameters(), torch::optim::AdamWOptions()).step();
    CAPTURE(counter.to_string());
    CHECK(counter.total() == 0);
  });
}

namespace {

struct TowerImpl : torch::nn::Module {
  TowerImpl(int64_t layers, int64_t width) {
    for (int64_t i = 0; i < layers; ++i) {
      mlps.push_back(register_module("mlp" + std::to_string(i), Mlp(width, width, width, /*bias=*/false)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (Mlp& mlp : mlps) x = mlp(x);
    return x;
  }
  std::vector<Mlp> mlps;
};
TORCH_MODULE(Tower);

// Returns the bytes that a step, forward and backward, needs beyond the parameters' bytes before it.
int64_t step_bytes(ParallelizeOptions options) {
  options.gradient_buckets.bucket_bytes = 128 * 128 * 4;  // one gradient each, of which two are under way
  const DeviceMesh mesh = fake_mesh(0, {4, 1}, {"dp", "tp"});
  Tower tower(8, 128);
  auto parallel = parallelize_module(tower, mesh, {}, options);
  const at::Tensor x = from_local(torch::ones({2, 128}), mesh, {Shard(0), Replicate()});
  return peak_bytes([&] { parallel(x).sum().backward(); });
}

}  // namespace

TEST_CASE("peak memory of a step: pieces of gradients and a few whole weights, not every weight or gradient") {
  constexpr int64_t kWeight = 128 * 128 * 4;
  constexpr int64_t kAll = 16 * kWeight;
  const int64_t whole = step_bytes({}), zero = step_bytes(kZero);
  MESSAGE("weights: ", kAll, " bytes in all; a step takes ", whole, " replicated, ", zero, " with data_placement");
  CHECK(whole >= kAll);
  CHECK(zero >= kAll / 4);
  // Two buckets are under way, each with what it sends and what it gets.
  CHECK(zero <= kAll / 4 + 6 * kWeight);
}

TEST_CASE("refused: other placements, a mesh without data dimensions, plain results") {
  const auto refused = [](const std::vector<int64_t>& shape, const std::vector<std::string>& names,
                          const ParallelPlan& plan, const ParallelizeOptions& options, const std::string& text) {
    check_refused_on_every_rank(shape, names, text, [&](const DeviceMesh& mesh) {
      Mlp mlp(4, 4, 4);
      parallelize_module(mlp, mesh, plan, options);
    });
  };
  refused({2, 2}, {"dp", "tp"}, kMlp, {.data_placement = Shard(1)}, "data_placement S(1); give Shard(0)");
  refused({2}, {"tp"}, kMlp, kZero, "has no data dimension");
  refused({2, 2}, {"dp", "tp"}, {{"up", ColwiseParallel({.use_local_output = true})}}, kZero,
          "use_local_output does not go with data_placement");
}
