// Tests that training resumes from a checkpoint with another number of ranks.

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim.h>
#include <torch/types.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/optimizer_state.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/world.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/io/test_files.h"
#include "tessera/tests/harness/ranks.h"

namespace tessera {
namespace {

using testing::world;
using torch::optim::Optimizer;
using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor>)>;

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    register_module("up", up);
    register_module("norm", norm);
    register_module("down", down);
    // Values that every process computes alike, without communication.
    const torch::NoGradGuard no_grad;
    double phase = 0;
    for (at::Tensor& p : parameters()) {
      p.set_data(torch::sin(torch::arange(p.numel(), torch::kDouble) + ++phase).mul(0.5).reshape(p.sizes()));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::tanh(up(norm(x)))); }

  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({6})};
  torch::nn::Linear up{6, 10};  // 10 over 4 ranks is 3, 3, 3, 1
  torch::nn::Linear down{10, 5};
};
TORCH_MODULE(Mlp);

template <typename Class, typename Options>
MakeOptimizer make(Options options) {
  return [options](std::vector<at::Tensor> params) { return std::make_unique<Class>(std::move(params), options); };
}

std::vector<std::pair<std::string, MakeOptimizer>> optimizers() {
  using namespace torch::optim;
  return {{"SGD", make<SGD>(SGDOptions(0.1).momentum(0.9))},
          {"Adam", make<Adam>(AdamOptions(0.01).amsgrad(true))},
          {"AdamW", make<AdamW>(AdamWOptions(0.01))},
          {"RMSprop", make<RMSprop>(RMSpropOptions(0.01).momentum(0.5).centered(true))},
          {"Adagrad", make<Adagrad>(AdagradOptions(0.1))},
          {"LBFGS", make<LBFGS>(LBFGSOptions(0.1).max_iter(2).history_size(3))}};
}

void train(Mlp& mlp, Optimizer& optimizer, int64_t from, int64_t to) {
  const ImplicitReplication replicated;  // x is the same on every rank
  for (int64_t i = from; i < to; ++i) {
    const at::Tensor x =
        torch::cos(torch::arange(24, torch::kDouble).mul(0.1 + static_cast<double>(i))).reshape({4, 6});
    optimizer.step([&] {
      optimizer.zero_grad();
      const at::Tensor loss = mlp(x).square().mean();
      loss.backward();
      return loss;
    });
  }
}

ParallelPlan plan() { return {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}}; }

double largest_difference(const Mlp& sharded, const Mlp& whole) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const torch::NoGradGuard no_grad;
  double largest = 0;
  for (std::size_t i = 0; i < whole->parameters().size(); ++i) {
    const at::Tensor want = whole->parameters()[i];
    const at::Tensor got = full_tensor(sharded->parameters()[i]);
    const double difference = ((got - want).abs().max() / want.abs().max()).item<double>();
    // A NaN counts as infinity, which no later difference exceeds.
    if (!(difference <= largest)) largest = std::isnan(difference) ? infinity : difference;
  }
  return largest;
}

TESSERA_RANKS_TEST_CASE(
    "resume: 3 steps on 4 ranks, saved, 3 more on 1, 2 and 3 ranks: equal to 6 steps in one process",
    testing::Ranks({4, 1, 2, 3}).time_limit(std::chrono::seconds(120))) {
  // The path is the same for all four runs, which are children of one process.
  const char* base = std::getenv("TEST_TMPDIR");
  const std::string folder =
      std::string(base != nullptr ? base : "/tmp") + "/tessera_resume_" + std::to_string(::getppid());
  const DeviceMesh mesh = init_device_mesh("cpu", {world()->size()}, {"tp"}, world());
  std::filesystem::create_directories(folder);
  barrier(mesh, 0);
  for (const auto& each : optimizers()) {
    const auto& make_optimizer = each.second;
    CAPTURE(each.first);
    Mlp sharded;
    parallelize_module(sharded, mesh, plan());
    const std::unique_ptr<Optimizer> optimizer = make_optimizer(sharded->parameters());
    const std::string weights = folder + "/" + each.first + ".safetensors";
    const std::string state = folder + "/" + each.first + ".optimizer.safetensors";
    Mlp whole;
    const std::unique_ptr<Optimizer> reference = make_optimizer(whole->parameters());
    if (world()->size() == 4) {
      train(sharded, *optimizer, 0, 3);
      train(whole, *reference, 0, 3);
      CHECK(largest_difference(sharded, whole) < 1e-10);
      save_weights(*sharded, weights);
      save_optimizer(*optimizer, *sharded, state);
      continue;
    }
    load_weights(*sharded, weights);
    load_optimizer(*optimizer, *sharded, state);
    save_weights(*sharded, weights + ".again");
    save_optimizer(*optimizer, *sharded, state + ".again");
    barrier(mesh, 0);
    CHECK(read_text(weights) == read_text(weights + ".again"));
    CHECK(read_text(state) == read_text(state + ".again"));
    train(sharded, *optimizer, 3, 6);
    train(whole, *reference, 0, 6);
    CHECK(largest_difference(sharded, whole) < 1e-10);
  }
  barrier(mesh, 0);
  if (world()->size() == 3 && world()->rank() == 0) std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tessera
