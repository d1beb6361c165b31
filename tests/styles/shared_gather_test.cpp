// Tests that projections of one activation communicate it once: values, gradients, collectives.

#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct Projections : torch::nn::Module {
  explicit Projections(bool bias) {
    for (const char* name : {"q", "k", "v"}) {
      layers.push_back(register_module(name, torch::nn::Linear(torch::nn::LinearOptions(6, 10).bias(bias))));
    }
    to(device(), at::kDouble);
    const c10::AutoGradMode none(false);
    int64_t seed = 4;
    for (const at::Tensor& each : parameters()) each.copy_(sample(each.sizes(), seed++));
  }
  at::Tensor forward(const at::Tensor& x) { return layers[0](x) * layers[1](x) + layers[2](x).pow(2); }

  std::vector<torch::nn::Linear> layers;
};

std::shared_ptr<Projections> cut(const DeviceMesh& mesh, int64_t dim, bool bias = true) {
  auto out = std::make_shared<Projections>(bias);
  parallelize_module(*out, mesh, {{"*", ColwiseParallel({.input_layouts = Shard(dim)})}});
  return out;
}

void check_gathers_once(const at::Tensor& whole, int64_t dim, bool bias, const DeviceMesh& mesh) {
  const auto tp = cut(mesh, dim, bias), one = std::make_shared<Projections>(bias);
  const at::Tensor want_leaf = leaf(whole), given_leaf = leaf(spread(whole, mesh, {Shard(dim)}));
  const at::Tensor want = one->forward(want_leaf * 2);
  CommCounter counter(mesh);
  const at::Tensor y = tp->forward(given_leaf * 2);
  CHECK(counter.count("all_gather") == 1);
  CHECK(counter.total() == 1);
  CHECK(close(full_tensor(y.detach()), want.detach()));
  const at::Tensor g = sample(want.sizes(), 6), spread_g = spread(g, mesh, {Shard(want.dim() - 1)});
  counter.reset();
  want.backward(g);
  y.backward(spread_g);
  CHECK(counter.total() == 1);
  if (whole.size(dim) % mesh.size() == 0) CHECK(counter.count("reduce_scatter") == 1);
  CHECK(close(full_tensor(given_leaf.grad()), want_leaf.grad()));
  for (std::size_t i = 0; i < one->parameters().size(); ++i) {
    CHECK(close(full_tensor(tp->parameters()[i].grad()), one->parameters()[i].grad()));
  }
}

}  // namespace

TESSERA_RANKS_TEST_CASE("projections of one activation gather it once, and reduce its gradient once", {2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const bool bias : {false, true}) {
    check_gathers_once(sample({2, 12, 6}), 1, bias, mesh);
    check_gathers_once(sample({7, 2, 6}), 0, bias, mesh);  // uneven, and empty on the last of four ranks
    check_gathers_once(sample({5, 6}), 0, bias, mesh);
    check_gathers_once(sample({1, 6}), 0, bias, mesh);
  }
}

TESSERA_RANKS_TEST_CASE("the gradient of an activation of which a view was written is reduced as a contract asks",
                        {2, 3}) {
  const DeviceMesh mesh = line();
  const auto tp = cut(mesh, 1), one = std::make_shared<Projections>(true);
  const at::Tensor whole = sample({2, 6, 6}), want_x = leaf(whole), x = leaf(spread(whole, mesh, {Shard(1)}));
  const auto run = [](Projections& module, const at::Tensor& input) {
    const at::Tensor h = input * 1;
    h.select(0, 0).zero_();
    h.isnan();  // an operator without a contract sees it first
    return module.forward(h);
  };
  const Strict strict;
  const at::Tensor want = run(*one, want_x), y = run(*tp, x);
  const at::Tensor g = sample(want.sizes(), 6);
  want.backward(g);
  y.backward(spread(g, mesh, {Shard(2)}));
  CHECK(close(full_tensor(x.grad()), want_x.grad()));
}

TESSERA_RANKS_TEST_CASE("an activation that was written between two projections is gathered again", {2, 3}) {
  const DeviceMesh mesh = line();
  const auto tp = cut(mesh, 1), one = std::make_shared<Projections>(true);
  const at::Tensor whole = leaf(sample({2, 5, 6})), part = leaf(spread(whole.detach(), mesh, {Shard(1)}));
  CommCounter counter(mesh);
  const at::Tensor x = part * 2, before = tp->layers[0](x);
  x.mul_(3);
  const at::Tensor loss = before.sum() + tp->layers[1](x).pow(2).sum();
  CHECK(counter.count("all_gather") == 2);
  // Plain LibTorch refuses to write an input that a product has saved, so here the second one is another tensor.
  const at::Tensor want = one->layers[0](whole * 2).sum() + one->layers[1](whole * 6).pow(2).sum();
  CHECK(close(full_tensor(loss.detach()), want.detach()));
  loss.backward();
  want.backward();
  CHECK(close(full_tensor(part.grad()), whole.grad()));
}

TESSERA_RANKS_TEST_CASE("an alias outside the graph has a gather of its own, and gets no gradient", {2, 3}) {
  const DeviceMesh mesh = line();
  const auto tp = cut(mesh, 1), one = std::make_shared<Projections>(true);
  const at::Tensor whole = leaf(sample({2, 5, 6})), part = leaf(spread(whole.detach(), mesh, {Shard(1)}));
  const auto loss_of = [](Projections& module, const at::Tensor& in) {
    const at::Tensor x = in * 2, outside = x.detach(), other = x.detach().requires_grad_();
    const at::Tensor q = module.layers[0](x), k = module.layers[1](outside), v = module.layers[2](other);
    return (q * k * v).sum();
  };
  const at::Tensor loss = loss_of(*tp, part), want = loss_of(*one, whole);
  CHECK(close(full_tensor(loss.detach()), want.detach()));
  loss.backward();
  want.backward();
  CHECK(close(full_tensor(part.grad()), whole.grad()));
}

TESSERA_RANKS_TEST_CASE("what is gathered once is freed with the graph that saves it", {2}) {
  const DeviceMesh mesh = line();
  const auto tp = cut(mesh, 1);
  const at::Tensor x = leaf(spread(sample({2, 4, 6}), mesh, {Shard(1)})) * 2;
  CommCounter counter(mesh);
  at::Tensor q = tp->layers[0](x);
  tp->layers[1](x);
  CHECK(counter.count("all_gather") == 1);
  q.reset();
  tp->layers[2](x);  // nobody holds the gathered activation any more
  CHECK(counter.count("all_gather") == 2);
  const c10::AutoGradMode none(false);
  tp->layers[0](x);
  tp->layers[1](x);
  CHECK(counter.count("all_gather") == 4);
}

TESSERA_RANKS_TEST_CASE("graphs that are kept, and gradients of gradients, of an activation that is gathered once",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const auto tp = cut(mesh, 1, false), one = std::make_shared<Projections>(false);
  const at::Tensor whole = leaf(sample({2, 12, 6})), part = leaf(spread(whole.detach(), mesh, {Shard(1)}));
  const auto run = [](Projections& module, const at::Tensor& in) {
    const at::Tensor loss = module.forward(in * 2).pow(2).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward({}, /*retain_graph=*/true);
    torch::autograd::grad({loss}, {in}, {}, true, true)[0].pow(2).sum().backward();
  };
  run(*one, whole);
  run(*tp, part);
  CHECK(close(full_tensor(part.grad()), whole.grad(), 1e-11));
  for (std::size_t i = 0; i < one->parameters().size(); ++i) {
    CHECK(close(full_tensor(tp->parameters()[i].grad()), one->parameters()[i].grad(), 1e-11));
  }
}

TESSERA_RANKS_TEST_CASE("one gather beside data parallelism, also where some of the projections are frozen", {4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2}, {"dp", "tp"}, world());
  for (const bool frozen : {false, true}) {
    const auto tp = cut(mesh, 1), one = std::make_shared<Projections>(true);
    if (frozen) {
      for (const auto& module : {tp, one}) module->layers[1]->weight.requires_grad_(false);
    }
    const at::Tensor whole = leaf(sample({4, 6, 6})), part = leaf(spread(whole.detach(), mesh, {Shard(0), Shard(1)}));
    for (int i = 0; i < 2; ++i) {
      CommCounter counter(mesh);
      const at::Tensor loss = tp->forward(part * 2).pow(2).sum(), want = one->forward(whole * 2).pow(2).sum();
      CHECK(counter.count("all_gather") == 1);
      CHECK(close(full_tensor(loss.detach()), want.detach()));
      counter.reset();
      loss.backward();
      want.backward();
      CHECK(counter.count("reduce_scatter") == 1);
    }
    CHECK(close(full_tensor(part.grad()), whole.grad()));
    for (std::size_t i = 0; i < one->parameters().size(); ++i) {
      const at::Tensor &given = tp->parameters()[i].grad(), &wanted = one->parameters()[i].grad();
      CHECK(given.defined() == wanted.defined());
      if (given.defined()) CHECK(close(full_tensor(given), wanted));
    }
  }
}
