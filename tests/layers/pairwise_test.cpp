#include "tessera/layers/pairwise.h"

#include <stdexcept>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/sgd.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/styles/hooks.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/layers/counted.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Makes linear layers between those widths, with ReLU between them and the same values on every rank.
torch::nn::Sequential mlp(const std::vector<int64_t>& widths) {
  torch::nn::Sequential out;
  for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
    if (i > 0) out->push_back(torch::nn::ReLU());
    out->push_back(torch::nn::Linear(widths[i], widths[i + 1]));
  }
  out->to(device(), at::kDouble);
  const c10::AutoGradMode none(false);
  int64_t seed = 5;
  for (const at::Tensor& each : out->parameters()) at::Tensor(each).copy_(sample(each.sizes(), ++seed));
  return out;
}

struct PlainLinearImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
};
TESSERA_MODULE(PlainLinear);

int64_t get_dim(const at::Tensor& t) { return placements_of(t)[0].tensor_dim(); }

}  // namespace

TESSERA_RANKS_TEST_CASE("pairs of layers equal one process: results, gradients and a step of SGD", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size();
  for (const bool sequence : {false, true}) {
    for (const std::vector<int64_t>& widths :
         std::vector<std::vector<int64_t>>{{10, 16, 12}, {10, 16, 12, 8, 4}, {10, 16, 12, 5}}) {
      CAPTURE(sequence);
      CAPTURE(widths.size());
      const bool pairs_alone = widths.size() % 2 == 1;
      torch::nn::Sequential model = mlp(widths), one = mlp(widths);
      auto tp = parallelize_module(model, mesh, PairwiseParallel(sequence));
      torch::optim::SGD here(model->parameters(), 0.25), there(one->parameters(), 0.25);
      const at::Tensor x = sample({2 * n, 10}), mine = sequence ? piece_of(x, mesh, {Shard(0)}) : x;
      CommCounter counter(mesh);
      const at::Tensor y = tp(mine), want = one->forward(x);
      if (n > 1 && widths.size() == 3) {
        CHECK(counter.count("all_reduce") == (sequence ? 0 : 1));
        CHECK(counter.count("all_gather") == (sequence ? 1 : 0));
        CHECK(counter.count("reduce_scatter") == (sequence ? 1 : 0));
      }
      CHECK(is_dtensor(y) != pairs_alone);  // a whole layer of a DTensor gives a DTensor
      const at::Tensor whole = is_dtensor(y) ? full_tensor(y)
                               : sequence    ? full_tensor(from_local(y, mesh, {Shard(0)}))
                                             : y;
      CHECK(close(whole.detach(), want.detach()));
      whole.pow(2).sum().backward();
      want.pow(2).sum().backward();
      here.step();
      there.step();
      const auto parameters = model->parameters(), expected = one->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        CHECK(close(full_tensor(parameters[i].grad()), expected[i].grad(), 1e-11));
        CHECK(close(full_tensor(parameters[i].detach()), expected[i].detach(), 1e-11));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("a pair's gradient of the input, and its collectives", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size();
  for (const bool sequence : {false, true}) {
    torch::nn::Sequential model = mlp({10, 16, 12}), one = mlp({10, 16, 12});
    auto tp = parallelize_module(model, mesh, PairwiseParallel(sequence));
    const at::Tensor whole = sample({2 * n, 10}).requires_grad_(), g = sample({2 * n, 12}, 2);
    const Placement cut = sequence ? Shard(0) : Replicate();
    const at::Tensor mine = piece_of(whole, mesh, {cut}).clone().requires_grad_();
    CommCounter counter(mesh);
    const at::Tensor y = tp(mine);
    CHECK(counted(counter) == (n == 1 ? "" : sequence ? "1 all_gather, 1 reduce_scatter" : "1 all_reduce"));
    counter.reset();
    y.backward(piece_of(g, mesh, {cut}));
    CHECK(counted(counter) == (n == 1 ? "" : sequence ? "1 all_gather, 1 reduce_scatter" : "1 all_reduce"));
    one->forward(whole).backward(g);
    CHECK(close(mine.grad(), piece_of(whole.grad(), mesh, {cut})));
  }
}

TESSERA_RANKS_TEST_CASE("an empty plan is no PairwiseParallel", {1}) {
  torch::nn::Linear model(4, 4);
  model->to(device());
  parallelize_module(model, line(), {});
  CHECK(placements_of(model->weight) == Placements{Replicate()});
}

TESSERA_RANKS_TEST_CASE("pairs are found below other modules, and a module without one is refused", {2}) {
  const DeviceMesh mesh = line();
  torch::nn::Module outer;
  outer.register_module("act", torch::nn::ReLU());
  outer.register_module("mlp", mlp({6, 8, 6}));
  const ParallelPlan plan = PairwiseParallel().plan(outer);
  REQUIRE(plan.size() == 2);
  CHECK(plan[0].first == "mlp.0");
  CHECK(plan[0].second->name() == "ColwiseParallel");
  CHECK(plan[1].first == "mlp.2");
  CHECK(plan[1].second->name() == "RowwiseParallel");
  torch::nn::Linear alone(4, 4);
  alone->to(device());
  CHECK_THROWS_WITH_AS(parallelize_module(alone, mesh, PairwiseParallel()),
                       doctest::Contains("more than one Linear is needed"), std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("a module without a pair on one rank is refused on every rank, and the job goes on", {2, 3}) {
  const DeviceMesh mesh = line();
  torch::nn::Sequential model = rank() == 1 ? mlp({6, 8}) : mlp({6, 8, 6}), good = mlp({6, 8, 6});
  CHECK_THROWS_WITH_AS(parallelize_module(model, mesh, PairwiseParallel()),
                       doctest::Contains("rank 1: PairwiseParallel: more than one Linear is needed"),
                       std::invalid_argument);
  CHECK_NOTHROW(parallelize_module(good, mesh, PairwiseParallel()));
}

TESSERA_RANKS_TEST_CASE("pairs are found by their names, also where these look like patterns", {2}) {
  const DeviceMesh mesh = line();
  torch::nn::Module model;
  torch::nn::Linear up(4, 4), down(4, 4);
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({4}));
  model.register_module("fc[1]", up);
  model.register_module("fc[2]", down);
  model.register_module("fc1", norm);
  model.to(device());
  parallelize_module(model, mesh, PairwiseParallel());
  CHECK(get_dim(up->weight) == 0);
  CHECK(get_dim(down->weight) == 1);
  CHECK(placements_of(norm->weight) == Placements{Replicate()});
}

TESSERA_RANKS_TEST_CASE("functions of one's own before and after a style's module", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({2 * mesh.size(), 6}), weight = sample({8, 6}, 2);
  PlainLinear layer(6, 8);
  layer->to(device(), at::kDouble);
  {
    const c10::AutoGradMode none(false);
    layer->weight.copy_(weight);
    layer->bias.zero_();
  }
  const PrepareFunction doubled = [](const at::Tensor& y, const MaybeMesh& given) {
    return make_output_tensor(y, given) * 2;
  };
  const Prepared style(
      ColwiseParallel(), [](const at::Tensor& t, const MaybeMesh& m) { return make_input_reshard_replicate(t, m); },
      doubled);
  CHECK(style.to_string() == "ColwiseParallel, prepared before and after");
  auto tp = parallelize_module(layer, mesh, style);
  CHECK(get_dim(layer->weight) == 0);
  CHECK(close(tp(piece_of(x, mesh, {Shard(0)})).detach(), at::linear(x, weight) * 2));
  torch::nn::Linear plain(6, 8);
  plain->to(device());
  CHECK_THROWS_WITH_AS(parallelize_module(plain, mesh, style), doctest::Contains("TESSERA_MODULE"),
                       std::invalid_argument);
  PlainLinear refusing(6, 8);
  refusing->to(device());
  auto checked = parallelize_module(
      refusing, mesh, Prepared(ColwiseParallel(), nullptr, [](const at::Tensor& y, const MaybeMesh& given) {
        return make_output_tensor(to_local(y), given);
      }));
  CHECK_THROWS_WITH_AS(checked(at::ones({2, 6}, on(at::kFloat))),
                       doctest::Contains("Expect output of Tensor Parallel to be a DTensor"), std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("a layer with two names is one of a pair once, and functions alone leave the style to the plan",
                        {2}) {
  const DeviceMesh mesh = line();
  torch::nn::Module tied;
  torch::nn::Linear up(4, 4), down(4, 4);
  tied.register_module("up", up);
  tied.register_module("again", up);
  tied.register_module("down", down);
  const ParallelPlan plan = PairwiseParallel().plan(tied);
  REQUIRE(plan.size() == 2);
  CHECK(plan[1].first == "down");

  PlainLinear layer(6, 8);
  layer->to(device());
  {
    const c10::AutoGradMode none(false);
    layer->weight.copy_(sample({8, 6}, 2));
    layer->bias.copy_(sample({8}, 3));
  }
  const at::Tensor x = at::ones({2, 6}, on(at::kFloat)), want = layer(x).detach();
  const Prepared functions(nullptr, [](const at::Tensor& y, const MaybeMesh& m) { return make_output_tensor(y, m); });
  CHECK(functions.to_string() == "Prepared, prepared after");
  auto tp = parallelize_module(layer, mesh, {{"", ColwiseParallel()}, {"", functions}});
  CHECK(at::allclose(tp(x).detach(), want));
}
