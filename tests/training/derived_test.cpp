// Tests values computed from parameters that are sharded over the data dimension too, and operators that take both,
// against one process.

#include <functional>
#include <string>
#include <vector>

#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dispatch/explain_op.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/fake_mesh.h"
#include "tessera/tests/training/data_placement.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

// Returns numbers that are the same on every rank: ranks are threads here, which share the process's generator.
at::Tensor waves(at::IntArrayRef sizes, double seed) {
  return at::arange(c10::multiply_integers(sizes), on(at::kDouble)).mul(0.37 + 0.11 * seed).add(seed).sin().view(sizes);
}

struct UsesImpl;
using Use = std::function<at::Tensor(const UsesImpl&, const at::Tensor& x)>;

// A module that uses some parameters in one particular way; x is [8, 8], and so are some of them.
struct UsesImpl : torch::nn::Module {
  UsesImpl(const std::string& used, Use how) : use(std::move(how)) {
    double seed = 0;
    const auto make = [&](const std::string& name, at::IntArrayRef sizes) {
      ++seed;
      const bool is_used = (" " + used + " ").find(" " + name + " ") != std::string::npos;
      return is_used ? register_parameter(name, waves(sizes, seed)) : at::Tensor();
    };
    wq = make("wq", {8, 8});
    wk = make("wk", {8, 8});
    v = make("v", {10, 8});
    g = make("g", {10, 1});
    a = make("a", {8, 2});
    b = make("b", {2, 8});
    items = make("items", {8, 1, 8});
    token = make("token", {1, 1, 8});
    mask = register_buffer("mask", (waves({8, 8}, 8) > 0).to(at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) { return use(*this, x); }
  Use use;
  at::Tensor wq, wk, v, g, a, b, items, token, mask;
};
TORCH_MODULE(Uses);

struct Row {
  std::string why;
  std::string used;
  Use use;
  int64_t gathers;         // in forward, on 2 x 1
  int64_t reductions = 0;  // all_reduces of one number
  int64_t moves = 0;       // of pieces from rank to rank
};

at::Tensor times(const at::Tensor& x, const at::Tensor& weight) { return at::matmul(x, weight.t()); }

const std::vector<Row>& rows() {
  using M = const UsesImpl&;
  using T = const at::Tensor&;
  static const std::vector<Row> all = {
      {"a multiple", "wq", [](M m, T x) { return times(x, m.wq * 0.5); }, 1},
      {"a function and a sum", "wq wk", [](M m, T x) { return times(x, m.wq.tanh() + m.wk); }, 1},
      {"a transposed copy", "wq", [](M m, T x) { return at::matmul(x, m.wq.t().contiguous()); }, 1},
      {"rows joined", "wq wk",
       [](M m, T x) {
         return times(x, at::cat({m.wq, m.wk}));
       },
       1},
      {"columns joined", "wq wk",
       [](M m, T x) {
         return times(at::cat({x, x}, 1), at::cat({m.wq, m.wk}, 1));
       },
       1},
      {"stacked", "wq wk",
       [](M m, T x) {
         return at::matmul(x, at::stack({m.wq, m.wk}).sum(0));
       },
       1},
      {"weight norm", "v g", [](M m, T x) { return times(x, m.g * m.v / m.v.norm(2, {1}, true)); }, 1},
      {"divided by its norm", "wq", [](M m, T x) { return times(x, m.wq / m.wq.norm()); }, 1, 1},
      {"softmax over the rows", "wq", [](M m, T x) { return at::matmul(x, m.wq.softmax(0)); }, 1},
      {"softmax over the columns", "wq", [](M m, T x) { return at::matmul(x, m.wq.softmax(1)); }, 1},
      {"masked by a buffer", "wq", [](M m, T x) { return times(x, m.wq * m.mask); }, 1},
      {"a product of low rank besides", "wq a b", [](M m, T x) { return times(x, m.wq + m.a.matmul(m.b)); }, 3},
      {"a penalty besides", "wq wk", [](M m, T x) { return at::matmul(x, m.wq) + m.wk.square().sum(); }, 1, 1},
      {"a copy that is written", "wq wk", [](M m, T x) { return times(x, m.wq.clone().mul_(m.wk).add_(1)); }, 1},
      {"of the activation's shape and layout, in a product", "wq", [](M m, T x) { return at::matmul(x, m.wq); }, 1},
      {"of the activation's shape and layout, element by element", "wq", [](M m, T x) { return x * m.wq; }, 0},
      {"a token before each item", "token",
       [](M m, T x) {
         return at::cat({m.token.expand({x.size(0), 1, 8}), x.unsqueeze(1)}, 1).square().sum(1);
       },
       1, 0, 1},
      {"items of a product", "items", [](M m, T x) { return at::bmm(m.items, x.unsqueeze(2)); }, 1},
  };
  return all;
}

const std::vector<std::vector<int64_t>> kShapes = {{1, 1}, {2, 1}, {3, 1}, {2, 2}, {4, 1}};

}  // namespace

TEST_CASE(
    "what is computed from parameters alone is gathered at its use: training equals one process, Strict in forward") {
  for (const Row& row : rows()) {
    CAPTURE(row.why);
    for (const std::vector<int64_t>& shape : kShapes) {
      CAPTURE(fmt::format("{} x {}", shape[0], shape[1]));
      run_in_process(shape[0] * shape[1], [&](const std::shared_ptr<World>& world) {
        const DeviceMesh mesh = init_device_mesh(device_name(), shape, {"dp", "tp"}, world);
        const auto make = [&] { return Uses(row.used, row.use); };
        train<torch::optim::SGD>(make, {}, waves({8, 8}, 9), mesh, torch::optim::SGDOptions(0.05).weight_decay(0.1),
                                 Under::kStrictForward);
        train<torch::optim::AdamW>(make, {}, waves({8, 8}, 9), mesh, torch::optim::AdamWOptions(),
                                   Under::kStrictForward);
      });
    }
  }
}

TEST_CASE("collectives of forward: each parameter gathered once, and what is computed of pieces once for all") {
  for (const Row& row : rows()) {
    CAPTURE(row.why);
    run_in_process(2, [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh(device_name(), {2, 1}, {"dp", "tp"}, world);
      Uses module(row.used, row.use);
      auto zero = parallelize_module(module, mesh, {}, kZero);
      const CommCounter counter(mesh);
      zero(piece(waves({8, 8}, 9), mesh));
      CAPTURE(counter.to_string());
      CHECK(counter.count("all_gather") == row.gathers);
      CHECK(counter.count("all_reduce") == row.reductions);
      CHECK(counter.count("permute") == row.moves);
      CHECK(counter.total() == row.gathers + row.reductions + row.moves);
    });
  }
}

namespace {

// Takes the batch first, as the other modules do; LibTorch's module takes the sequence first.
struct AttendsImpl : torch::nn::Module {
  AttendsImpl() : attention(register_module("attention", torch::nn::MultiheadAttention(12, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor sequence = x.transpose(0, 1);
    return std::get<0>(attention(sequence, sequence, sequence)).transpose(0, 1);
  }
  torch::nn::MultiheadAttention attention;
};
TORCH_MODULE(Attends);

const Rows kPackedKeyBias = {"in_proj_bias", 12, 24};

}  // namespace

TEST_CASE("MultiheadAttention with data_placement equals one process, under Strict") {
  const at::Tensor x = waves({4, 5, 12}, 1);
  for (const std::vector<int64_t>& shape : kShapes) {
    CAPTURE(fmt::format("{} x {}", shape[0], shape[1]));
    run_in_process(shape[0] * shape[1], [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh(device_name(), shape, {"dp", "tp"}, world);
      const auto make = [] {
        Attends module;
        const torch::NoGradGuard no_grad;
        double seed = 0;
        module->to(device(), at::kDouble);
        for (at::Tensor& p : module->parameters()) p.copy_(waves(p.sizes(), ++seed));
        return module;
      };
      train<torch::optim::SGD>(make, {}, x, mesh, torch::optim::SGDOptions(0.05), Under::kStrictForward,
                               kPackedKeyBias);
    });
  }
}

TEST_CASE("explain_op says what runs: parameters are gathered first, or stay sharded") {
  const DeviceMesh mesh = fake_mesh(0, {2, 1}, {"dp", "tp"});
  Mlp module(6, 8, 4);
  auto zero = parallelize_module(module, mesh, {}, kZero);
  const at::Tensor x = from_local(at::ones({3, 6}), mesh, {Shard(0), Replicate()}),
                   weight = module->up->weight.detach();
  const CommCounter counter(mesh);
  const OpExplanation product = explain_op("aten::mm", {x, weight.t()});
  CAPTURE(product.to_string());
  REQUIRE(product.steps.size() == 1);
  CHECK(product.steps[0].find("up.weight gathered to [R, R] by") != std::string::npos);
  CHECK(product.inputs == std::vector<Placements>{{Shard(0), Replicate()}, {Replicate(), Replicate()}});
  CHECK(product.outputs == std::vector<Placements>{{Shard(0), Replicate()}});
  const OpExplanation multiple = explain_op("aten::mul.Tensor", {weight, at::ones({})});
  CHECK(multiple.steps.empty());
  CHECK(multiple.outputs == std::vector<Placements>{{Shard(0), Replicate()}});
  const OpExplanation softmax = explain_op("aten::_softmax", {weight, 0, false});
  CHECK(softmax.steps.size() == 1);
  CHECK(softmax.outputs == std::vector<Placements>{{Replicate(), Replicate()}});
  CHECK(counter.total() == 0);
}
