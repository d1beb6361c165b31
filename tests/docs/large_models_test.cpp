// Holds the C++ of docs/large-models.md about choosing, and of docs/styles.md about functions and modules of one's own,
// which no other program has: docs_test compares them.

#include <sys/resource.h>

#include <cstdint>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>

#include <torch/torch.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/deferred/sharded_init.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/describe.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/docs/mlp.h"
#include "tessera/tests/harness/ranks.h"

namespace {

using Model = Mlp;

// Has a convolution, a norm, pooling and upsampling, as a small U-Net has them.
struct SmallUNetImpl : torch::nn::Module {
  SmallUNetImpl()
      : first(register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1)))),
        norm(register_module("norm", torch::nn::BatchNorm2d(4))),
        second(register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 2, 3).padding(1)))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = torch::relu(norm(first(x)));
    return second(torch::upsample_nearest2d(torch::max_pool2d(y, 2), {y.size(2), y.size(3)}) + y);
  }
  torch::nn::Conv2d first;
  torch::nn::BatchNorm2d norm;
  torch::nn::Conv2d second;
};
TORCH_MODULE(SmallUNet);

struct CoderImpl : torch::nn::Module {
  CoderImpl() : table(register_module("table", torch::nn::Linear(4, 3))) {}
  at::Tensor encode(const at::Tensor& x) { return torch::tanh(table(x * torch::ones({4}))); }
  at::Tensor loss(const at::Tensor& x, double scale) { return encode(x).square().mean() * scale; }
  torch::nn::Linear table;
};
TORCH_MODULE(Coder);

struct ConvolutionsImpl : torch::nn::Module {
  ConvolutionsImpl()
      : first(register_module("first", torch::nn::Conv2d(2, 4, 3))),
        second(register_module("second", torch::nn::Conv2d(4, 2, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return second(torch::relu(first(x))); }
  torch::nn::Conv2d first, second;
};
TORCH_MODULE(Convolutions);

void copy_parameters(torch::nn::Module& to, torch::nn::Module& from) {
  const torch::NoGradGuard no_grad;
  const auto there = from.named_parameters();
  for (auto& item : to.named_parameters()) item.value().copy_(there[item.key()]);
}

}  // namespace

TESSERA_RANKS_TEST_CASE("docs/large-models.md: a file of torch::save is converted once", {1, 2}) {
  const int64_t rank = tessera::testing::rank();
  const std::string old_file = "old_" + std::to_string(rank) + ".pt";
  const std::string new_file = "new_" + std::to_string(rank) + ".safetensors";
  torch::manual_seed(1);
  torch::save(Model(), old_file);
  Model whole;
  torch::load(whole, old_file);
  tessera::save_weights(*whole, new_file);

  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {tessera::testing::world()->size()}, {"tp"});
  Model model;
  auto tp = tessera::parallelize_module(model, mesh, {{"up", tessera::ColwiseParallel()}});
  tessera::load_weights(*model, new_file);
  CHECK(torch::equal(tessera::full_tensor(model->up->weight.detach()), whole->up->weight.detach()));
}

TEST_CASE("docs/large-models.md: will it fit?") {
  const tessera::ParallelPlan plan = {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}};
  const at::Tensor piece = torch::ones({2, 16});
  const tessera::DeviceMesh mesh =
      tessera::init_device_mesh("cpu", {8, 4}, {"dp", "tp"}, tessera::World::fake(/*rank=*/0, /*size=*/32));
  std::optional<tessera::ShardedInit> init(std::in_place, mesh);
  Model model;
  init.reset();
  auto tp = tessera::parallelize_module(model, mesh, plan, {.data_placement = tessera::Shard(0)});
  torch::optim::AdamW optimizer(model->parameters());
  std::optional<tessera::CommCounter> counter;
  for (int step = 0; step < 3; ++step) {
    if (step == 2) counter.emplace(mesh);  // from the third step on all steps are alike
    optimizer.zero_grad();
    tp(tessera::from_local(piece, mesh, {tessera::Shard(0), tessera::Replicate()})).square().mean().backward();
    optimizer.step();
  }
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  std::cout << tessera::describe(*model).bytes_here() << " bytes of parameters and buffers, " << used.ru_maxrss
            << " KiB at the peak, " << counter->total_bytes() << " bytes given to the collectives of a step\n";
  CHECK(tessera::describe(*model).bytes_here() < tessera::describe(*model).bytes_global() / 16);
  CHECK(counter->total_bytes() > 0);
}

TESSERA_RANKS_TEST_CASE("docs/large-models.md: images that are cut along their height", {4}) {
  torch::manual_seed(3);
  SmallUNet plain, model;
  copy_parameters(*model, *plain);
  const at::Tensor images = torch::randn({4, 2, 8, 6}), targets = torch::randn({4, 2, 8, 6});
  torch::mse_loss(plain(images), targets).backward();
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2, 2}, {"dp", "sp"});
  auto parallel = tessera::parallelize_module(model, mesh, {}, {.data_dims = {{"dp", "sp"}}});
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const at::Tensor x =
      tessera::distribute_tensor(images, mesh, {tessera::Shard(0), tessera::Shard(2)});  // batch and height
  const at::Tensor y = tessera::distribute_tensor(targets, mesh, {tessera::Shard(0), tessera::Shard(2)});
  torch::mse_loss(parallel(x), y).backward();
  optimizer.step();
  const tessera::Strict strict;
  const auto wanted = plain->named_parameters();
  for (const auto& item : model->named_parameters()) {
    CAPTURE(item.key());
    CHECK(torch::allclose(tessera::full_tensor(item.value().grad()), wanted[item.key()].grad(), 1e-3, 1e-4));
  }
}

TESSERA_RANKS_TEST_CASE("docs/styles.md: functions and modules of one's own", {2}) {
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2}, {"tp"});
  {
    Coder coder_module;
    auto parallel = tessera::parallelize_module(coder_module, mesh, tessera::ParallelPlan{});
    const at::Tensor x = torch::ones({2, 4});
    const at::Tensor code = parallel.call(&CoderImpl::encode, x);
    const at::Tensor loss = parallel.call([](CoderImpl& coder, const at::Tensor& t) { return coder.loss(t, 0.5); }, x);
    CHECK(tessera::full_tensor(loss).item<double>() ==
          doctest::Approx(0.5 * tessera::full_tensor(code).square().mean().item<double>()));
  }
  const tessera::ParallelPlan channels = {
      {"first", tessera::PlaceParameters({{"weight", tessera::Shard(0)}, {"bias", tessera::Shard(0)}})},
      {"second", tessera::PlaceParameters({{"weight", tessera::Shard(1)}})}};
  torch::manual_seed(5);
  Convolutions plain, model;
  copy_parameters(*model, *plain);
  auto parallel = tessera::parallelize_module(model, mesh, channels);
  const at::Tensor x = torch::ones({2, 2, 6, 6});
  CHECK(torch::allclose(tessera::full_tensor(parallel(x)), plain(x), 1e-4, 1e-5));
}
