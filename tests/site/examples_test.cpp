// Compiles and runs the examples of C++ in the comments of public headers, as they stand there; `...` in a comment
// stands for code that is added here. site_test fails where an example is missing here.

#include <atomic>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include <torch/script.h>
#include <torch/torch.h>

#include <doctest/doctest.h>

#include "tessera/dtensor/clip_grad_norm.h"
#include "tessera/dtensor/data/global_batch_sampler.h"
#include "tessera/dtensor/deferred/sharded_init.h"
#include "tessera/dtensor/dispatch/explain_op.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/explain.h"
#include "tessera/dtensor/fused_adamw.h"
#include "tessera/dtensor/gradient_buckets.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/dtensor/loss_scaler.h"
#include "tessera/dtensor/measured_costs.h"
#include "tessera/inspect/visualize.h"
#include "tessera/layers/activation_checkpoint.h"
#include "tessera/layers/pairwise.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"
#include "tessera/mesh/recorder.h"
#include "tessera/styles/parallelize.h"
#include "tessera/styles/script_module.h"
#include "tessera/styles/style.h"
#include "tessera/tests/docs/mlp.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tools/launcher/private_folder.h"

namespace {

using namespace tessera;
using tessera::testing::world;
using tessera::testing::world_size;

// placement/partition.h
class Halves final : public Partition {  // even elements first, odd ones second
 public:
  Halves() : Partition("Halves", "") {}
  Intervals part(int64_t size, int64_t parts, int64_t index) const override;
};

Intervals Halves::part(int64_t size, int64_t, int64_t index) const {
  Intervals elements;
  for (int64_t i = index; i < size; i += 2) elements.push_back({i, i + 1});
  return elements;
}

// styles/style.h
class BilinearByOutput : public ParallelStyle {
  void apply(ApplyContext& context) const override {
    context.place("weight", Shard(0));
    context.place("bias", Shard(0));
  }
  std::string name() const override { return "BilinearByOutput"; }
};

struct MyModelImpl : torch::nn::Module {
  explicit MyModelImpl(int64_t words) {
    table = register_module("table", torch::nn::Embedding(words, 4));
    up = register_module("up", torch::nn::Linear(4, 6));
  }
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& mask) { return up(table(ids)) * mask; }

  torch::nn::Embedding table{nullptr};
  torch::nn::Linear up{nullptr};
};
TORCH_MODULE(MyModel);

struct VaeImpl : torch::nn::Module {
  VaeImpl() { encoder = register_module("encoder", torch::nn::Linear(4, 2)); }
  at::Tensor forward(const at::Tensor& x) { return encoder(x); }
  at::Tensor encode(const at::Tensor& x) { return torch::tanh(encoder(x)); }
  at::Tensor loss(const at::Tensor& x, double weight) { return encode(x).square().sum() * weight; }

  torch::nn::Linear encoder{nullptr};
};
TORCH_MODULE(Vae);

// Gives every parameter the same values on every rank.
void fill(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (const at::Tensor& parameter : module.parameters()) {
    parameter.copy_(torch::linspace(-1, 1, parameter.numel()).view_as(parameter));
  }
}

void on_two_ranks(const std::function<void(const DeviceMesh& mesh)>& body) {
  run_in_process(2, [&](const std::shared_ptr<World>& world) { body(init_device_mesh("cpu", {2}, {"tp"}, world)); });
}

}  // namespace

TESSERA_RANKS_TEST_CASE("every rank gets the sum", {1, 2, 4}) {
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {world_size()}, {}, world());
  const at::Tensor one = from_local(torch::ones({1}), mesh, {Partial()});
  CHECK(full_tensor(one).item<int64_t>() == world_size());
}

// mesh/in_process.h
TEST_CASE("examples: ranks that are threads") {
  static std::atomic<int64_t> sizes;
  sizes = 0;
  run_in_process(8, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 4}, {"dp", "tp"}, world);
    sizes += mesh.mesh().size();
  });
  CHECK(sizes == 64);
}

TEST_CASE("examples: a partition of one's own") {
  const Placement halves = Shard(0, std::make_shared<const Halves>());
  on_two_ranks([&](const DeviceMesh& mesh) {
    const at::Tensor whole = torch::arange(5);
    const at::Tensor t = distribute_tensor(whole, mesh, {halves});
    CHECK(to_local(t).size(0) == (mesh.coordinate()->at(0) == 0 ? 3 : 2));
    CHECK(at::equal(full_tensor(t), whole));
  });
}

TEST_CASE("examples: a style of one's own") {
  on_two_ranks([](const DeviceMesh& mesh) {
    torch::nn::Bilinear bilinear(2, 3, 4);
    parallelize_module(bilinear, mesh, BilinearByOutput());
    CHECK(placements_of(bilinear->weight) == Placements{Shard(0)});
  });
}

TEST_CASE("examples: costs that were measured") {
  on_two_ranks([](const DeviceMesh& mesh) {
    const at::Tensor t = distribute_tensor(torch::ones({4, 4}), mesh, {Shard(0)});
    const tessera::CostModel costs = tessera::measured_costs(mesh);
    redistribute(t, {Shard(1)}, {.cost_model = costs});
    CHECK(costs.links.size() == 1);
  });
}

TEST_CASE("examples: a model that is built in its shards") {
  on_two_ranks([](const DeviceMesh& mesh) {
    const int64_t options = 10;
    const ParallelPlan plan = {{"table", RowwiseParallel()}, {"up", ColwiseParallel()}};
    const at::Tensor ids = torch::arange(3), mask = torch::ones({3, 1});
    ShardedInit init(mesh);
    MyModel model(options);                           // unmodified: LibTorch's modules, and modules of your own
    auto tp = parallelize_module(model, mesh, plan);  // every rank makes its pieces
    CHECK(to_local(model->table->weight).size(0) == 5);
  });
}

TEST_CASE("examples: a module is called as before") {
  on_two_ranks([](const DeviceMesh& mesh) {
    MyModel model(10);
    fill(*model);
    const ParallelPlan plan = {{"table", RowwiseParallel()}, {"up", ColwiseParallel()}};
    const at::Tensor ids = torch::arange(3), mask = torch::ones({3, 1});
    const at::Tensor want = model->forward(ids, mask);
    // clang-format off
    auto tp = parallelize_module(model, mesh, plan);   tp(ids, mask);   tp->eval();
    // clang-format on
    CHECK(torch::allclose(full_tensor(tp(ids, mask)), want));
    CHECK_FALSE(model->is_training());
  });
}

TEST_CASE("examples: other functions of a module are called") {
  on_two_ranks([](const DeviceMesh& mesh) {
    Vae vae;
    fill(*vae);
    const at::Tensor images = torch::ones({3, 4});
    const at::Tensor want = vae->encode(images), want_loss = vae->loss(images, 0.5);
    auto tp = parallelize_module(vae, mesh, {{"encoder", ColwiseParallel()}});
    const at::Tensor code = tp.call(&VaeImpl::encode, images);
    const at::Tensor loss = tp.call([](VaeImpl& vae, const at::Tensor& x) { return vae.loss(x, 0.5); }, images);
    CHECK(torch::allclose(full_tensor(code), want));
    CHECK(torch::allclose(full_tensor(loss), want_loss));
  });
}

TEST_CASE("examples: an activation is computed again in backward") {
  on_two_ranks([](const DeviceMesh& mesh) {
    Mlp block;
    fill(*block);
    at::Tensor x = torch::ones({2, 16});
    const at::Tensor want = block->forward(x);
    parallelize_module(block, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    x = distribute_tensor(x, mesh, {Replicate()});
    x = checkpoint([&](const at::Tensor& h) { return block->forward(h); }, x);
    CHECK(torch::allclose(full_tensor(x), want, 1e-5, 1e-6));
    x.sum().backward();
    CHECK(block->up->weight.grad().defined());
  });
}

TEST_CASE("examples: an MLP by two styles") {
  on_two_ranks([](const DeviceMesh& mesh) {
    const at::Tensor x = torch::ones({2, 16});
    Mlp mlp;
    fill(*mlp);
    const at::Tensor want = mlp->forward(x);
    auto tp = parallelize_module(mlp, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    CHECK(torch::allclose(full_tensor(tp(x)), want, 1e-5, 1e-6));
  });
}

TEST_CASE("examples: a TorchScript module") {
  on_two_ranks([](const DeviceMesh& mesh) {
    torch::jit::Module script("Scale");
    script.register_parameter("weight", torch::ones({4}), false);
    script.define("def forward(self, x):\n  return x * self.weight\n");
    const ParallelPlan plan;
    const at::Tensor ids = torch::arange(4);
    // clang-format off
    auto tp = parallelize_module(script, mesh, plan);   tp(ids).toTensor();   tp->eval();
    // clang-format on
    CHECK(at::equal(full_tensor(tp(ids).toTensor()), torch::arange(4).to(torch::kFloat)));
  });
}

TEST_CASE("examples: an operator is explained") {
  on_two_ranks([](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(torch::ones({4, 4}), mesh, {Replicate()}), w = x;
    std::cout << explain_op("aten::mm", {x, w});
    CHECK(explain_op("aten::mm", {x, w}).by_rule);
  });
}

TEST_CASE("examples: collectives are counted") {
  on_two_ranks([](const DeviceMesh& mesh) {
    Mlp mlp;
    auto tp = parallelize_module(mlp, mesh, PairwiseParallel());
    const auto forward = [&] { tp(torch::ones({2, 16})); };
    CommCounter counter(mesh);
    forward();
    CHECK(counter.count("all_reduce") == 1);
  });
}

TEST_CASE("examples: gradients are accumulated") {
  on_two_ranks([](const DeviceMesh& mesh) {
    torch::nn::Linear module(2, 3);
    fill(*module);
    auto dp = parallelize_module(module, mesh, ParallelPlan{});
    const int64_t count = 3;
    const auto batch = [&](int64_t i) { return torch::full({2, 2}, static_cast<double>(i)); };
    const auto loss_of = [&](const at::Tensor& x) { return dp(x).sum(); };
    for (int64_t i = 0; i < count; ++i) {
      std::optional<AccumulateGradients> guard;
      if (i + 1 < count) guard.emplace(mesh);
      loss_of(batch(i)).div(count).backward();
    }
    CHECK(at::allclose(full_tensor(module->bias.grad()), torch::full({3}, 2.0)));
  });
}

TEST_CASE("examples: a loss is scaled") {
  on_two_ranks([](const DeviceMesh& mesh) {
    Mlp model;
    fill(*model);
    auto tp = parallelize_module(model, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    LossScaler scaler;
    const at::Tensor loss = tp(torch::ones({2, 16})).square().mean();
    // clang-format off
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);   // only if gradients are looked at before the step
    clip_grad_norm_(model->parameters(), 1.0);
    scaler.step(optimizer);
    scaler.update();
    // clang-format on
    CHECK(scaler.state().scale > 0);
  });
}

TEST_CASE("examples: the state of FusedAdamW is saved") {
  const tessera::PrivateFolder private_folder;
  on_two_ranks([&](const DeviceMesh& mesh) {
    const std::string folder = private_folder.path() + "/state";
    torch::nn::Linear model(4, 4);
    const std::vector<at::Tensor> parameters = model->parameters();
    FusedAdamW fused(parameters);
    torch::optim::AdamW files(parameters);
    fused.give_state(files);
    save_training_state({.mesh = mesh, .model = *model, .optimizer = &files}, folder);
    CHECK(std::filesystem::exists(folder));
  });
}

TEST_CASE("examples: a data loader gets this rank's samples") {
  on_two_ranks([](const DeviceMesh& line) {
    using torch::data::transforms::Stack;
    const DeviceMesh mesh = line.unflatten(0, {2, 1}, {"dp", "tp"});
    const uint64_t seed = 3;
    struct Numbers : torch::data::datasets::Dataset<Numbers> {
      torch::data::Example<> get(std::size_t i) override {
        return {torch::full({1}, static_cast<int64_t>(i)), torch::zeros({1})};
      }
      std::optional<std::size_t> size() const override { return 64; }
    } dataset;
    const auto samples = static_cast<int64_t>(dataset.size().value());
    GlobalBatchSampler sampler({samples, 32, seed}, mesh, {Shard(0), Replicate()}, {.end_step = 1000});
    auto loader = torch::data::make_data_loader(dataset.map(Stack<>()), sampler, /*batch_size=*/32);
    CHECK(loader->begin()->data.size(0) == 16);
  });
}

TEST_CASE("examples: a plan is drawn, and a part of a step is recorded") {
  on_two_ranks([](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(torch::ones({4, 4}), mesh, {Shard(0)});
    const Placements placements = {Replicate()};
    std::cout << tessera::visualize(tessera::explain(x, placements).plan);
    const Recorder::Span span(mesh.world().recorder(), "forward");
    CHECK(mesh.world().recorder().on());
  });
}
