// Tests how parallelize_module learns which mesh dimensions split the batch, and what is refused because of them.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <doctest/doctest.h>
#include <torch/nn/module.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/styles/hooks.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/fake_mesh.h"

namespace {

using namespace tessera;
using tessera::testing::check_refused_on_every_rank;
using tessera::testing::fake_mesh;
using tessera::testing::Mlp;

struct Batch {
  at::Tensor x;
};

// Returns the sum of everything that it is given.
struct AdderImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& mask = {},
                     const std::vector<at::Tensor>& more = {}, double scale = 1) {
    at::Tensor sum = mask ? x + *mask : x;
    for (const at::Tensor& each : more) sum = sum + each;
    return sum * scale;
  }
};
TORCH_MODULE(Adder);
struct BatchedImpl : torch::nn::Module {
  at::Tensor forward(const Batch& batch) { return batch.x; }
};
TORCH_MODULE(Batched);

struct KeyValueCache {
  int64_t length = 0;
};
// Takes anything.
struct TakerImpl : torch::nn::Module {
  template <class... Args>
  void forward(const Args&...) {}
};
TORCH_MODULE(Taker);

// Has a function beside forward, with a plain mask of its own.
struct CoderImpl : torch::nn::Module {
  CoderImpl() : table(register_parameter("table", at::ones({8, 4}))) {}
  at::Tensor forward(const at::Tensor& x) { return encode(x, 4); }
  at::Tensor encode(const at::Tensor& x, int64_t width) { return at::mm(x, table * at::ones({4})).narrow(1, 0, width); }
  at::Tensor table;
};
TORCH_MODULE(Coder);

using HookedMlpImpl = tessera::testing::MlpImpl;
TESSERA_MODULE(HookedMlp);

const std::vector<int64_t> kFirst = {0};

}  // namespace

TEST_CASE("where several ranks split the batch, a call with plain tensors alone is refused, without a style too") {
  const auto call = [](const std::vector<int64_t>& shape, const auto& forward) {
    check_refused_on_every_rank(
        shape, {"dp", "tp"}, "the parallelized module: its input [2, 8] is plain, and on the mesh",
        [&](const DeviceMesh& mesh) {
          auto adder = parallelize_module(Adder(), mesh, ParallelPlan{}, {.src_rank = kNoSource});
          forward(adder);
        });
  };
  const at::Tensor x = at::ones({2, 8});
  call({2, 1}, [&](auto& adder) { adder(x); });
  call({2, 2}, [&](auto& adder) { adder(x, std::optional(x), std::vector<at::Tensor>{x}, 2.0); });
  const auto on = [&](const DeviceMesh& mesh) {
    auto adder = parallelize_module(Adder(), mesh, ParallelPlan{}, {.src_rank = kNoSource});
    const at::Tensor batch = from_local(x, mesh, {Shard(0), Replicate()});
    adder(batch);
    adder(batch, x.select(0, 0));
    adder(x.select(0, 0), std::optional(batch));
    adder(x.select(0, 0), std::nullopt, std::vector<at::Tensor>{batch});
    adder(DTensor(batch));
    adder(at::scalar_tensor(2));
    // Nobody knows what a type of the caller's own holds, so it passes.
    parallelize_module(Batched(), mesh, ParallelPlan{}, {.src_rank = kNoSource})(Batch{x});
  };
  const DeviceMesh plane = fake_mesh(1, {2, 2}, {"dp", "tp"});
  CHECK_NOTHROW(on(plane));
  // Forward may make the DTensor. Under InferenceMode each rank may have a batch of its own; without gradients alone a
  // layer that is trained might follow.
  CHECK_NOTHROW(parallelize_module(Adder(), plane, ParallelPlan{}, {.allow_plain = true, .src_rank = kNoSource})(x));
  CHECK_THROWS_AS(
      [&] {
        const c10::NoGradGuard none;
        parallelize_module(Adder(), plane, ParallelPlan{}, {.src_rank = kNoSource})(x);
      }(),
      std::invalid_argument);
  {
    const c10::InferenceMode inference;
    CHECK_NOTHROW(parallelize_module(Adder(), plane, ParallelPlan{}, {.src_rank = kNoSource})(x));
  }
  // A hook of the root may make it, also one that was added later.
  HookedMlp hooked(8, 4, 8);
  auto called = parallelize_module(hooked, plane, ParallelPlan{}, {.src_rank = kNoSource});
  hooked->register_forward_hook([](const std::vector<at::Tensor>&, std::vector<at::Tensor>&) {});
  CHECK_THROWS_AS(called(x), std::invalid_argument);
  hooked->register_forward_pre_hook([&](std::vector<at::Tensor>& inputs) {
    inputs.at(0) = from_local(x, plane, {Shard(0), Replicate()});
  });
  CHECK_NOTHROW(called(x));
  const DeviceMesh alone = fake_mesh(0, {1, 2}, {"dp", "tp"});
  CHECK_NOTHROW(parallelize_module(Adder(), alone, ParallelPlan{}, {.src_rank = kNoSource})(x));
}

TEST_CASE("call() calls any function of the module under the same guards and the same check") {
  const at::Tensor x = at::ones({2, 8});
  const DeviceMesh plane = fake_mesh(1, {2, 2}, {"dp", "tp"});
  auto coder =
      parallelize_module(Coder(), plane, ParallelPlan{}, {.compute_dtype = at::kBFloat16, .src_rank = kNoSource});
  const at::Tensor batch = from_local(x, plane, {Shard(0), Replicate()});
  const at::Tensor code = coder.call(&CoderImpl::encode, batch, 3);
  CHECK(is_dtensor(code));
  CHECK((code.scalar_type() == at::kBFloat16));  // a product: autocast was on
  CHECK(coder.call([](CoderImpl& module, const at::Tensor& t) { return module.encode(t, 2).size(1); }, batch) == 2);
  static_assert(std::is_same_v<decltype(coder.call(&CoderImpl::table)), at::Tensor&>);
  CHECK(coder.call(&CoderImpl::table).is_same(coder->table));
  check_refused_on_every_rank({2, 1}, {"dp", "tp"}, "the parallelized module: its input [2, 8] is plain",
                              [&](const DeviceMesh& mesh) {
                                auto plain = parallelize_module(Coder(), mesh, ParallelPlan{}, {.src_rank = kNoSource});
                                plain.call(&CoderImpl::encode, x, 3);
                              });
}

TEST_CASE("an operator of a converted module whose own forward was called says what to call") {
  check_refused_on_every_rank({2}, {"tp"}, "uses table of a module that parallelize_module has converted: call what",
                              [](const DeviceMesh& mesh) {
                                Coder module;
                                parallelize_module(module, mesh, ParallelPlan{}, {.src_rank = kNoSource});
                                module->encode(at::ones({2, 8}), 3);
                              });
}

TEST_CASE("pointers, strings and numbers do not stand for the batch; pairs, tuples and vectors are looked into") {
  const auto take = [](const DeviceMesh& mesh, const auto&... arguments) {
    parallelize_module(Taker(), mesh, ParallelPlan{}, {.src_rank = kNoSource})(arguments...);
  };
  const auto refused_beside = [&](const auto&... arguments) {
    check_refused_on_every_rank({2, 1}, {"dp", "tp"}, "the parallelized module: its input [2, 8] is plain",
                                [&](const DeviceMesh& mesh) { take(mesh, arguments...); });
  };
  const at::Tensor x = at::ones({2, 8});
  KeyValueCache cache;
  refused_beside(x, &cache, nullptr, 2.0, at::kLong, at::Scalar(0.5), at::Generator());
  refused_beside(x, std::make_shared<KeyValueCache>());
  refused_beside(x, "greedy", std::string("greedy"), std::vector<int64_t>{2, 8});
  refused_beside(std::make_tuple(1, x), std::make_pair(&cache, 0.5));
  refused_beside(std::make_pair(std::string("ids"), std::optional<at::Tensor>(x)));
  refused_beside(std::vector<std::tuple<at::Tensor, int64_t>>{{x, 3}});
  refused_beside(&x, std::make_shared<at::Tensor>(x));

  const DeviceMesh mesh = fake_mesh(1, {2, 2}, {"dp", "tp"});
  const at::Tensor batch = from_local(x, mesh, {Shard(0), Replicate()});
  CHECK_NOTHROW(take(mesh, x, std::make_tuple(2, batch)));
  CHECK_NOTHROW(take(mesh, std::make_pair(x, std::optional<at::Tensor>(batch)), &cache));
  CHECK_NOTHROW(take(mesh, x, &batch));
  CHECK_NOTHROW(take(mesh, std::make_shared<at::Tensor>(batch), x));
}

TEST_CASE("a mesh of one dimension splits the batch where its name or an option says so: no plain batch then") {
  const auto call = [](const DeviceMesh& mesh, const ParallelizeOptions& options) {
    parallelize_module(Adder(), mesh, ParallelPlan{}, options)(at::ones({2, 8}));
  };
  check_refused_on_every_rank({2}, {"dp"}, "its input [2, 8] is plain, and on the mesh {dp: 2} with data dimensions",
                              [&](const DeviceMesh& mesh) { call(mesh, {}); });
  check_refused_on_every_rank({2}, {"tp"}, "its input [2, 8] is plain, and on the mesh {tp: 2} with data dimensions",
                              [&](const DeviceMesh& mesh) { call(mesh, {.data_dims = kFirst}); });
  CHECK_NOTHROW(call(fake_mesh(0, {2}, {"tp"}), {}));
  CHECK_NOTHROW(call(fake_mesh(0, {2}), {}));
  CHECK_NOTHROW(call(fake_mesh(0, {2}, {"dp"}), {.tensor_dim = 0}));
  CHECK_NOTHROW(call(fake_mesh(0, {2}, {"dp"}), {.data_dims = std::vector<int64_t>{}}));
}

TEST_CASE("where all mesh dimensions split the batch, a style that cuts something is refused") {
  const auto refused_style = [](const std::string& path, const Style& style) {
    check_refused_on_every_rank(
        {2}, {"dp"}, "): no mesh dimension is left for tensors, since data_dims [0] are all that {dp: 2} has",
        [&](const DeviceMesh& mesh) {
          HookedMlp mlp(8, 6, 8);
          parallelize_module(mlp, mesh, {{path, style}}, {.data_dims = kFirst});
        });
  };
  // Cuts nothing itself, but says how an activation is laid out on the tensor dimension.
  struct Kept : ParallelStyle {
    void apply(ApplyContext& context) const override {
      context.place("weight", Replicate());
      context.contract("weight", {.operators = {"matmul"}, .input = Replicate(), .desired = Replicate(), .output = {}});
    }
    std::string name() const override { return "Kept"; }
  };
  refused_style("up", ColwiseParallel());
  refused_style("up", Kept());
  refused_style("", PrepareModuleInput({.input_layouts = {Shard(0)}, .desired_input_layouts = {Replicate()}}));
  struct Whole : ParallelStyle {
    void apply(ApplyContext& context) const override { context.place("weight", Replicate()); }
    std::string name() const override { return "Whole"; }
  };
  Mlp mlp(8, 6, 8);
  parallelize_module(mlp, fake_mesh(0, {2, 2}, {"host", "dp"}), {{"up", Whole()}},
                     {.data_dims = std::vector<int64_t>{1, 0}, .src_rank = kNoSource});
  CHECK(placements_of(mlp->up->weight) == Placements{Replicate(), Replicate()});
}

TEST_CASE("a parameter with requires_grad on a mesh that lacks ranks of a data dimension is refused") {
  const auto both = [](const DeviceMesh& whole, const DeviceMesh& part, bool trained) {
    Mlp mlp(8, 6, 8);
    parallelize_module(mlp->up, part, ColwiseParallel(), {.src_rank = kNoSource});
    for (const at::Tensor& t : mlp->up->parameters()) t.set_requires_grad(trained);
    parallelize_module(mlp, whole, {{"down", RowwiseParallel()}}, {.src_rank = kNoSource});
  };
  for (const char* text : {"the parameter up.weight is a DTensor on the mesh {tp: 2}",
                           "which lacks ranks along dp of {dp: 2, tp: 2}: its gradient would not be reduced"}) {
    check_refused_on_every_rank({2, 2}, {"dp", "tp"}, text,
                                [&](const DeviceMesh& mesh) { both(mesh, mesh["tp"], /*trained=*/true); });
  }
  const DeviceMesh mesh = fake_mesh(2, {2, 2}, {"dp", "tp"}), alone = fake_mesh(1, {1, 2}, {"dp", "tp"});
  CHECK_NOTHROW(both(mesh, mesh["tp"], /*trained=*/false));
  CHECK_NOTHROW(both(mesh, mesh.merged({0, 1}), /*trained=*/true));
  CHECK_NOTHROW(both(alone, alone["tp"], /*trained=*/true));
}
