// Holds the code of docs/serving.md.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <torch/torch.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/broadcast_data.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/docs/mlp.h"
#include "tessera/tests/harness/ranks.h"

TESSERA_RANKS_TEST_CASE("docs/serving.md: rank 0 takes requests of several shapes, and all ranks answer them",
                        {1, 2, 3, 4}) {
  using namespace std::chrono_literals;
  const auto world = tessera::World::from_environment();
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {world->size()}, {"tp"}, world);
  const tessera::DeviceMesh requests =
      tessera::init_device_mesh("cpu", {world->size()}, {"requests"}, world, {{"requests", {.timeout = 24h}}});

  torch::manual_seed(3);
  Mlp plain, model;
  for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
    model->parameters()[i].set_data(plain->parameters()[i].detach().clone());
  }
  auto tp = tessera::parallelize_module(model, mesh,
                                        {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}});

  const std::vector<at::Tensor> queue = {torch::randn({1, 16}), torch::randn({5, 16}), torch::randn({2, 3, 16})};
  std::size_t taken = 0;
  const auto next = [&] { return taken < queue.size() ? queue[taken++] : torch::empty({0}); };
  std::vector<at::Tensor> answers;
  const auto answer = [&](const at::Tensor& y) { answers.push_back(y); };

  const c10::InferenceMode inference;
  tessera::barrier(requests, 0);  // makes its group while every rank is here
  while (true) {
    std::map<std::string, at::Tensor> request;
    if (requests.local_rank(0) == 0) mesh.world().guard("serve", [&] { request["x"] = next(); });
    tessera::broadcast(torch::zeros({1}), requests, 0, 0);  // the other ranks wait here
    const at::Tensor x = tessera::broadcast_data({"x"}, request, at::kFloat, mesh).at("x");
    if (x.numel() == 0) break;
    const at::Tensor y = tessera::full_tensor(tp(x));
    if (requests.local_rank(0) == 0) answer(y);
  }

  CHECK(taken == (requests.local_rank(0) == 0 ? queue.size() : 0));
  REQUIRE(answers.size() == taken);
  for (std::size_t i = 0; i < taken; ++i) CHECK(torch::allclose(answers[i], plain->forward(queue[i]), 1e-5, 1e-6));
}
