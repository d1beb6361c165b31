// Tests in one process, on a fake mesh, what parallelize_module does to parameters.

#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/styles/describe.h"
#include "tessera/styles/distribute_module.h"
#include "tessera/styles/hooks.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/io/logged.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/fake_mesh.h"

namespace {

using namespace tessera;
using tessera::testing::fake_mesh;
using tessera::testing::Mlp;
using torch::nn::Linear;

// The embedding's table is also the head's weight: one tensor, registered twice.
struct TiedHeadImpl : torch::nn::LinearImpl {
  explicit TiedHeadImpl(const at::Tensor& shared)
      : LinearImpl(torch::nn::LinearOptions(shared.size(1), shared.size(0)).bias(false)) {
    weight = parameters_["weight"] = shared;
  }
};
TORCH_MODULE(TiedHead);

struct TiedImpl : torch::nn::Module {
  TiedImpl()
      : tok(register_module("tok", torch::nn::Embedding(12, 8))),
        head(register_module("head", TiedHead(tok->weight))) {}
  torch::nn::Embedding tok;
  TiedHead head;
};
TORCH_MODULE(Tied);

// Two parameters share one memory.
struct AliasedImpl : torch::nn::Module {
  explicit AliasedImpl(bool whole) {
    a = register_module("a", Linear(torch::nn::LinearOptions(8, 8).bias(false)));
    b = register_module("b", Linear(torch::nn::LinearOptions(8, 8).bias(false)));
    b->weight.set_data(whole ? a->weight.detach() : a->weight.detach().t());
  }
  Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(Aliased);

struct SameImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TESSERA_MODULE(Same);

const Contract& contract_of(const at::Tensor& t) {
  REQUIRE(tessera::detail::meta(t).contract != nullptr);
  return *tessera::detail::meta(t).contract;
}

}  // namespace

TEST_CASE("every style lays parameters out and leaves its contracts") {
  struct Row {
    const char* why;
    Style style;
    bool embedding;
    Placement weight, bias;
    std::vector<std::string> operators;
    Placement input, desired;
    std::optional<Placement> output;
  };
  const std::vector<std::string> linear = {"matmul", "addmm"};
  const std::vector<Row> rows = {
      {"colwise", ColwiseParallel(), false, Shard(0), Shard(0), linear, Replicate(), Replicate(), Shard(-1)},
      {"colwise from a shard", ColwiseParallel({.input_layouts = Shard(0)}), false, Shard(0), Shard(0), linear,
       Shard(0), Replicate(), Shard(-1)},
      {"colwise, gathered: the bias is added after", ColwiseParallel({.output_layouts = Replicate()}), false, Shard(0),
       Replicate(), linear, Replicate(), Replicate(), Replicate()},
      {"rowwise", RowwiseParallel(), false, Shard(1), Replicate(), linear, Shard(-1), Shard(-1), Replicate()},
      {"rowwise from whole", RowwiseParallel({.input_layouts = Replicate()}), false, Shard(1), Replicate(), linear,
       Replicate(), Shard(-1), Replicate()},
      {"rowwise to a sequence", RowwiseParallel({.output_layouts = Shard(1)}), false, Shard(1), Replicate(), linear,
       Shard(-1), Shard(-1), Shard(1)},
      {"rowwise, desired", RowwiseParallel({.desired_input_layouts = Replicate()}), false, Shard(1), Replicate(),
       linear, Shard(-1), Replicate(), Replicate()},
      {"embedding by columns",
       ColwiseParallel(),
       true,
       Shard(1),
       Replicate(),
       {"embedding"},
       Replicate(),
       Replicate(),
       Shard(-1)},
      {"embedding by rows",
       RowwiseParallel(),
       true,
       Shard(0),
       Replicate(),
       {"embedding"},
       Replicate(),
       Replicate(),
       Replicate()},
      {"embedding by rows to a sequence",
       RowwiseParallel({.output_layouts = Shard(1)}),
       true,
       Shard(0),
       Replicate(),
       {"embedding"},
       Replicate(),
       Replicate(),
       Shard(1)},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    const DeviceMesh mesh = fake_mesh(1, {4});
    torch::nn::Embedding embedding(8, 6);
    Linear module(6, 8);
    if (row.embedding)
      parallelize_module(embedding, mesh, row.style, {.src_rank = kNoSource});
    else
      parallelize_module(module, mesh, row.style, {.src_rank = kNoSource});
    const at::Tensor weight = row.embedding ? embedding->weight : module->weight;
    CHECK(placements_of(weight) == Placements{row.weight});
    const Contract& contract = contract_of(weight);
    CHECK(contract.path == "weight");
    CHECK(contract.operators == row.operators);
    CHECK(contract.input == row.input);
    CHECK(contract.desired == row.desired);
    CHECK(contract.output == row.output);
    CHECK_FALSE(contract.use_local_output);
    CHECK(contract.data_dims.empty());
    if (!row.embedding) CHECK(placements_of(module->bias) == Placements{row.bias});
    if (!row.embedding) CHECK(contract_of(module->bias).operators.empty());
    if (!row.embedding) CHECK(contract_of(module->bias).path == "bias");
  }
}

TEST_CASE("with a local output the bias has a contract with the plain result's layout") {
  Linear module(6, 8);
  parallelize_module(module, fake_mesh(0, {2}), RowwiseParallel({.output_layouts = Shard(0), .use_local_output = true}),
                     {.src_rank = kNoSource});
  CHECK(contract_of(module->weight).use_local_output);
  const Contract& bias = contract_of(module->bias);
  CHECK(bias.path == "bias");
  CHECK(bias.operators == std::vector<std::string>{"add"});
  CHECK(bias.output == Shard(0));
  CHECK(bias.use_local_output);
}

TEST_CASE("on a mesh of two dimensions the style shards over the tensor dimension, and the other splits the batch") {
  for (const bool named : {true, false}) {
    CAPTURE(named);
    Mlp mlp(8, 6, 8);
    const DeviceMesh mesh = named ? fake_mesh(3, {2, 2}, {"dp", "tp"}) : fake_mesh(3, {2, 2});
    ParallelizeOptions options{.src_rank = kNoSource};
    if (!named) options.tensor_dim = -1;
    parallelize_module(mlp, mesh, {{"up", ColwiseParallel()}}, options);
    CHECK(placements_of(mlp->up->weight) == Placements{Replicate(), Shard(0)});
    CHECK(placements_of(mlp->down->weight) == Placements{Replicate(), Replicate()});
    CHECK(contract_of(mlp->up->weight).mesh_dim == 1);
    CHECK(contract_of(mlp->up->weight).data_dims == std::vector<int64_t>{0});
    CHECK(contract_of(mlp->up->weight).path == "up.weight");
  }
  Mlp mlp(8, 6, 8);
  parallelize_module(mlp, fake_mesh(3, {2, 2}), {{"up", RowwiseParallel()}},
                     {.tensor_dim = 0, .data_dims = std::vector<int64_t>{}, .src_rank = kNoSource});
  CHECK(placements_of(mlp->up->weight) == Placements{Shard(1), Replicate()});
  CHECK(contract_of(mlp->up->weight).data_dims.empty());
}

TEST_CASE("each rank keeps its part of its own values where there is no source") {
  for (int64_t rank = 0; rank < 4; ++rank) {
    CAPTURE(rank);
    Linear module(5, 6);
    {
      const at::NoGradGuard no_grad;
      module->weight.copy_(at::arange(30, at::kFloat).view({6, 5}));
    }
    const at::Tensor whole = module->weight.detach().clone();
    parallelize_module(module, fake_mesh(rank, {4}), ColwiseParallel(), {.src_rank = kNoSource});
    const at::Tensor local = to_local(module->weight).detach();
    const std::vector<int64_t> begin = {0, 2, 4, 6}, end = {2, 4, 6, 6};
    const auto i = static_cast<std::size_t>(rank);
    CHECK(at::equal(local, whole.slice(0, begin[i], end[i])));
    CHECK(module->weight.sizes().vec() == std::vector<int64_t>{6, 5});
  }
}

TEST_CASE(
    "parameters keep their handles, requires_grad, dtype and gradient; buffers of every dtype are converted too") {
  const DeviceMesh mesh = fake_mesh(0, {2});
  torch::nn::Sequential model(Linear(4, 4), torch::nn::BatchNorm1d(4));
  const auto linear = std::dynamic_pointer_cast<torch::nn::LinearImpl>(model->ptr(0));
  linear->to(at::kDouble);
  linear->weight.set_requires_grad(false);
  linear->bias.mutable_grad() = at::ones({4}, at::kDouble);
  const std::vector<at::Tensor> handles = model->parameters();
  parallelize_module(model, mesh, {{"0", ColwiseParallel()}}, {.src_rank = kNoSource});
  for (const at::Tensor& t : handles) CHECK(is_dtensor(t));
  CHECK(handles.at(0).is_same(linear->weight));
  CHECK_FALSE(linear->weight.requires_grad());
  CHECK(linear->bias.requires_grad());
  CHECK((linear->weight.scalar_type() == at::kDouble));
  REQUIRE(is_dtensor(linear->bias.grad()));
  CHECK(placements_of(linear->bias.grad()) == Placements{Shard(0)});
  const auto buffers = model->named_buffers();
  CHECK(placements_of(buffers["1.num_batches_tracked"]) == Placements{Replicate()});
  CHECK((buffers["1.num_batches_tracked"].scalar_type() == at::kLong));
  CHECK(placements_of(buffers["1.running_mean"]) == Placements{Replicate()});
}

TEST_CASE("a tied tensor stays one, with the contracts of both its modules") {
  Tied model;
  parallelize_module(model, fake_mesh(0, {2}),
                     {{"tok", RowwiseParallel()}, {"head", ColwiseParallel({.output_layouts = Replicate()})}},
                     {.src_rank = kNoSource});
  CHECK(model->tok->weight.is_same(model->head->weight));
  CHECK(placements_of(model->tok->weight) == Placements{Shard(0)});
  const ContractPtr& all = tessera::detail::meta(model->tok->weight).contract;
  REQUIRE(contract_for(all, "embedding") != nullptr);
  REQUIRE(contract_for(all, "matmul") != nullptr);
  CHECK(contract_for(all, "embedding")->path == "tok.weight");
  CHECK(contract_for(all, "matmul")->path == "head.weight");
  CHECK(contract_for(all, "add") == nullptr);
}

TEST_CASE("one style on a tied tensor's two modules is one contract") {
  Tied model;
  torch::nn::Sequential two(model->head, TiedHead(model->tok->weight));
  parallelize_module(two, fake_mesh(0, {2}), {{"*", ColwiseParallel()}}, {.src_rank = kNoSource});
  CHECK(contract_of(model->tok->weight).next == nullptr);
}

TEST_CASE("a weight tied by assigning the member is the one that is laid out") {
  torch::nn::Embedding tok(12, 8);
  Linear head(torch::nn::LinearOptions(8, 12).bias(false));
  head->weight = tok->weight;
  torch::nn::Sequential model(tok, head);
  parallelize_module(model, fake_mesh(0, {2}), {{"0", RowwiseParallel()}, {"1", ColwiseParallel()}},
                     {.src_rank = kNoSource});
  CHECK(placements_of(tok->weight) == Placements{Shard(0)});
  CHECK(contract_for(tessera::detail::meta(head->weight).contract, "matmul") != nullptr);
  // The tensor left behind is cut as well, so that no rank holds it whole.
  CHECK(placements_of(head->named_parameters()["weight"]) == Placements{Shard(0)});
}

TEST_CASE("a bias that was assigned is laid out too, also where the layer was made without one") {
  Linear with(4, 4), without(torch::nn::LinearOptions(4, 4).bias(false));
  with->bias = torch::zeros({4});
  without->bias = torch::zeros({4});
  torch::nn::Sequential model(with, without);
  parallelize_module(model, fake_mesh(0, {2}), {{"*", ColwiseParallel()}}, {.src_rank = kNoSource});
  CHECK(placements_of(with->bias) == Placements{Shard(0)});
  CHECK(placements_of(without->bias) == Placements{Shard(0)});
}

TEST_CASE("parameters over the same memory go on sharing it") {
  Aliased model(/*whole=*/true);
  parallelize_module(model, fake_mesh(1, {2}), {{"*", ColwiseParallel()}}, {.src_rank = kNoSource});
  CHECK_FALSE(model->a->weight.is_same(model->b->weight));
  CHECK(tessera::detail::meta(model->a->weight).local().is_alias_of(tessera::detail::meta(model->b->weight).local()));
  // A write to one is seen where the other is saved.
  const at::Tensor loss = model->b->weight.exp().mul(model->b->weight).sum();
  to_local(model->a->weight.detach()).zero_();
  CHECK_THROWS_WITH(loss.backward(), doctest::Contains("has been modified by an inplace operation"));
}

TEST_CASE("a view of a parameter that is kept as a member is warned of") {
  struct FusedImpl : torch::nn::Module {
    explicit FusedImpl(bool keeps_view) : w(register_parameter("w", at::ones({6, 4}))) {
      if (keeps_view) queries = w.slice(0, 0, 3);
    }
    at::Tensor forward(const at::Tensor& x) { return x.matmul(queries.t()); }
    at::Tensor w, queries;
  };
  for (const bool keeps_view : {false, true}) {
    const auto fused = std::make_shared<FusedImpl>(keeps_view);
    const auto convert = [&] { parallelize_module(fused, fake_mesh(0, {2}), {}, {.src_rank = kNoSource}); };
    const std::string text = logged(convert, LogLevel::kWarning);
    CHECK((text.find("parallelize_module: the memory of w is shared with a tensor that is no parameter") !=
           std::string::npos) == keeps_view);
  }
}

TEST_CASE("a parameter that takes over other values by set_data keeps its contract, also one that ZeRO cuts") {
  const auto convert = [](const Mlp& mlp, std::optional<Placement> data_placement) {
    parallelize_module(mlp, data_placement ? fake_mesh(1, {2, 2}, {"dp", "tp"}) : fake_mesh(1, {2}),
                       {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}},
                       {.data_placement = std::move(data_placement), .src_rank = kNoSource});
  };
  const torch::NoGradGuard no_grad;
  Mlp cut(8, 6, 8);
  convert(cut, Shard(0));
  const auto of_weight = tessera::detail::meta(cut->down->weight).contract;
  for (const at::Tensor& values : {cut->down->weight * 0.5, cut->down->weight.clamp(-1, 1) * 0.5}) {
    cut->down->weight.set_data(values);
    CHECK(tessera::detail::meta(cut->down->weight).contract == of_weight);
  }
  Mlp mlp(8, 6, 8);
  convert(mlp, std::nullopt);
  const DeviceMesh mesh = mesh_of(mlp->down->weight);
  const at::Tensor weight = mlp->down->weight, average = at::zeros_like(weight);
  const auto contract = tessera::detail::meta(weight).contract;
  REQUIRE(contract != nullptr);
  for (const at::Tensor& values : {weight * 0.5, average, weight.detach().clone()}) {
    weight.set_data(values);
    CHECK(tessera::detail::meta(weight).contract == contract);
    CHECK(tessera::detail::meta(weight).local().is_alias_of(tessera::detail::meta(values).local()));
  }
  for (const at::Tensor& values :
       {tessera::zeros({8, 6}, mesh, {Replicate()}), tessera::zeros({8, 4}, mesh, {Shard(1)})}) {
    CHECK_THROWS_WITH_AS(weight.set_data(values),
                         doctest::Contains("set_data: the parameter down.weight of a RowwiseParallel is "),
                         std::invalid_argument);
    CHECK(tessera::detail::meta(values).contract == nullptr);
  }
  CHECK(weight.sizes() == at::IntArrayRef({8, 6}));
}

TEST_CASE("a handle of the class beneath a TESSERA_MODULE is refused where hooks would not run") {
  const DeviceMesh mesh = fake_mesh(0, {2});
  const at::Tensor x = at::ones({2, 4});
  const auto passes = [&](auto handle) { CHECK(handle(x).equal(x)); };
  Same hooked, bare;
  hooked->register_forward_pre_hook([](std::vector<at::Tensor>&) {});
  SameImpl &impl = *hooked, &bare_impl = *bare;
  const std::string text = "got a pointer or reference to the class beneath";
  auto by_reference = parallelize_module(impl, mesh, ParallelPlan());
  CHECK_THROWS_WITH_AS(by_reference(x), doctest::Contains(text.c_str()), std::invalid_argument);
  auto by_pointer = parallelize_module(std::static_pointer_cast<SameImpl>(hooked.ptr()), mesh, ParallelPlan());
  CHECK_THROWS_WITH_AS(by_pointer(x), doctest::Contains(text.c_str()), std::invalid_argument);
  passes(parallelize_module(hooked, mesh, ParallelPlan()));
  passes(parallelize_module(*hooked, mesh, ParallelPlan()));
  passes(parallelize_module(hooked.ptr(), mesh, ParallelPlan()));
  passes(parallelize_module(bare_impl, mesh, ParallelPlan()));
}

TEST_CASE("a module with two names is styled once") {
  Linear shared(4, 4);
  torch::nn::Sequential model(shared, shared);
  parallelize_module(model, fake_mesh(0, {2}), {{"*", ColwiseParallel()}}, {.src_rank = kNoSource});
  CHECK(contract_of(shared->weight).path == "0.weight");
  CHECK(contract_of(shared->weight).next == nullptr);
}

TEST_CASE("SequenceParallel: whole parameters, activations cut along the sequence; nothing on a module without any") {
  torch::nn::Sequential model(torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})), torch::nn::Dropout(),
                              torch::nn::GroupNorm(2, 4));
  parallelize_module(model, fake_mesh(0, {2}),
                     {{"0", SequenceParallel()}, {"1", SequenceParallel()}, {"2", SequenceParallel(2)}},
                     {.src_rank = kNoSource});
  const auto parameters = model->named_parameters();
  for (const auto& item : parameters) CHECK(placements_of(item.value()) == Placements{Replicate()});
  CHECK(contract_for(tessera::detail::meta(parameters["0.weight"]).contract, "layer_norm")->input == Shard(1));
  CHECK(contract_for(tessera::detail::meta(parameters["2.bias"]).contract, "group_norm")->desired == Shard(2));
}

TEST_CASE("a style of the user's own") {
  struct Halves : ParallelStyle {
    void apply(ApplyContext& context) const override {
      CHECK(context.path() == "down");
      CHECK(context.type() == "torch::nn::LinearImpl");
      CHECK(context.tensor_dim() == 0);
      CHECK(context.has("bias"));
      context.place("weight", Shard(-1));
      context.contract("weight", {.operators = {"matmul"}, .input = Shard(-1), .desired = Shard(-1), .output = {}});
    }
    std::string name() const override { return "Halves"; }
  };
  Mlp mlp(8, 6, 8);
  parallelize_module(mlp, fake_mesh(0, {2}), {{"down", Halves()}}, {.src_rank = kNoSource});
  CHECK(placements_of(mlp->down->weight) == Placements{Shard(1)});
  CHECK(placements_of(mlp->down->bias) == Placements{Replicate()});
  CHECK_FALSE(contract_of(mlp->down->weight).output.has_value());
}

TEST_CASE("a contract of conv2d acts however its padding is given") {
  struct Channels : ParallelStyle {
    void apply(ApplyContext& context) const override {
      context.place("weight", Shard(0));
      context.contract("weight", {.operators = {"conv2d"},
                                  .input = Replicate(),
                                  .desired = Replicate(),
                                  .output = Replicate(),
                                  .use_local_output = true});
    }
    std::string name() const override { return "Channels"; }
  };
  for (const bool named : {false, true}) {
    torch::nn::Conv2dOptions options(2, 4, 3);
    options.bias(false);
    if (named) {
      options.padding(torch::kSame);
    } else {
      options.padding(1);
    }
    torch::nn::Conv2d conv(options);
    auto called = parallelize_module(conv, fake_mesh(0, {2}), Channels(), {.src_rank = kNoSource});
    const at::Tensor y = called(at::ones({1, 2, 5, 5}));
    CHECK_FALSE(is_dtensor(y));
    CHECK(y.sizes() == at::IntArrayRef({1, 4, 5, 5}));
  }
}

TEST_CASE("a rank outside the mesh has parameters without a piece") {
  const auto world = World::fake(3, 4);
  const DeviceMesh mesh(world, at::kCPU, Mesh({2}, {"tp"}, {0, 1}));
  Mlp mlp(8, 6, 8);
  parallelize_module(mlp, mesh, {{"up", ColwiseParallel()}});
  CHECK(mlp->up->weight.sizes().vec() == std::vector<int64_t>{6, 8});
  CHECK(to_local(mlp->up->weight).numel() == 0);
  CHECK(describe(*mlp).bytes_here() == 0);
}

TEST_CASE("describe shows each parameter, its placements and its bytes here") {
  Tied model;
  const DeviceMesh mesh = fake_mesh(1, {8});
  CHECK(describe(*model).rows.at(0).placements == std::nullopt);
  parallelize_module(model, mesh, {{"tok", RowwiseParallel()}}, {.src_rank = kNoSource});
  const Description description = describe(*model);
  CHECK(description.bytes_here() == 2 * 8 * 4);
  CHECK(description.bytes_global() == 12 * 8 * 4);
  CHECK(description.rows.at(1).same_as == "tok.weight");
  CHECK(to_string(description) ==
        "path  type                                 parameter  global shape  placements  local shape    bytes here\n"
        "tok   torch::nn::EmbeddingImpl             weight     [12, 8]       [S(0)]      [2, 8]                 64\n"
        "head  (anonymous namespace)::TiedHeadImpl  weight     [12, 8]       [S(0)]      [2, 8]       = tok.weight\n"
        "64 bytes here of 384\n");
}

TEST_CASE("distribute_module: what the partition function leaves is replicated") {
  Mlp mlp(8, 6, 8);
  const DeviceMesh mesh = fake_mesh(0, {2});
  std::vector<std::string> seen;
  distribute_module(*mlp, mesh, [&](const std::string& path, torch::nn::Module& module, const DeviceMesh& on) {
    seen.push_back(path);
    auto* const linear = module.as<torch::nn::LinearImpl>();
    if (linear != nullptr) distribute_in_place(linear->weight, on, {Shard(0)}, kNoSource);
  });
  CHECK(seen == std::vector<std::string>{"", "up", "down"});
  CHECK(placements_of(mlp->up->weight) == Placements{Shard(0)});
  CHECK(placements_of(mlp->up->bias) == Placements{Replicate()});
  CHECK(contract_of(mlp->up->weight).operators.empty());
}

TEST_CASE("distribute_module: the partition function gets a module that has two names once") {
  torch::nn::Linear shared(8, 6);
  torch::nn::Module model;
  model.register_module("a", shared);
  model.register_module("b", shared);
  std::vector<std::string> seen;
  distribute_module(model, fake_mesh(0, {2}),
                    [&](const std::string& path, torch::nn::Module&, const DeviceMesh&) { seen.push_back(path); });
  CHECK(seen == std::vector<std::string>{"", "a"});
}
