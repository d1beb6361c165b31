// Tests what docs/getting-started.md says about ranks in one process, and docs/serving.md about threads of one rank.

#include <thread>
#include <vector>

#include <torch/torch.h>

#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/docs/mlp.h"

TEST_CASE("a parallel MLP gives the plain one's numbers and gradients on eight ranks of this process") {
  Mlp plain;
  const at::Tensor x = torch::randn({8, 16}), want = plain->forward(x);
  want.square().sum().backward();
  tessera::run_in_process(8, [&](const std::shared_ptr<tessera::World>& world) {
    const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {8}, {"tp"}, world);
    Mlp model;
    {
      const torch::NoGradGuard no_grad;
      const auto to = model->parameters(), from = plain->parameters();
      for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
    }
    auto tp = tessera::parallelize_module(model, mesh,
                                          {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}});
    const at::Tensor y = tp(x);
    CHECK(torch::allclose(tessera::full_tensor(y), want, 1e-5, 1e-6));
    y.square().sum().backward();
    CHECK(torch::allclose(tessera::full_tensor(model->up->weight.grad()), plain->up->weight.grad(), 1e-4, 1e-5));
  });
}

TEST_CASE("a training step on two by two ranks of this process") {
  tessera::run_in_process(4, [](const std::shared_ptr<tessera::World>& world) {
    const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world);
    const at::Tensor x =
        tessera::distribute_tensor(torch::ones({4, 16}), mesh, {tessera::Shard(0), tessera::Replicate()});
    Mlp model;
    auto tp = tessera::parallelize_module(model, mesh,
                                          {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}},
                                          {.tensor_dim = 1, .data_dims = {{0}}});
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    const at::Tensor before = tp(x).square().mean();
    before.backward();
    optimizer.step();
    const at::Tensor after = tp(x).square().mean();
    CHECK(after.item<double>() < before.item<double>());
  });
}

TEST_CASE("several threads run a module of one rank at once, without gradients") {
  const std::shared_ptr<tessera::World> world = tessera::World::create({});
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {1}, {"tp"}, world);
  Mlp model;
  const at::Tensor x = torch::randn({8, 16}), want = model->forward(x).detach();
  auto tp = tessera::parallelize_module(model, mesh,
                                        {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}});
  std::vector<int> right(4, 0);
  std::vector<std::thread> threads;
  for (int& count : right) {
    threads.emplace_back([&] {
      const torch::NoGradGuard no_grad;
      for (int i = 0; i < 20; ++i) count += torch::allclose(tessera::to_local(tp(x)), want, 1e-5, 1e-6) ? 1 : 0;
    });
  }
  for (std::thread& each : threads) each.join();
  CHECK(right == std::vector<int>(4, 20));
}
