// Tests what parallelize_module refuses on every rank before it converts anything.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/ones.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/sgd.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/styles/distribute_module.h"
#include "tessera/styles/hooks.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/fake_mesh.h"

namespace {

using namespace tessera;
using tessera::testing::check_refused_on_every_rank;
using tessera::testing::fake_mesh;
using tessera::testing::Mlp;
using torch::nn::Linear;

using Mlp2Impl = tessera::testing::MlpImpl;
TESSERA_MODULE(Mlp2);

struct HolderImpl : torch::nn::Module {
  explicit HolderImpl(at::Tensor t) { register_parameter("weight", std::move(t), /*requires_grad=*/false); }
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TORCH_MODULE(Holder);

struct PairImpl : torch::nn::Module {
  PairImpl(const at::Tensor& a, const at::Tensor& b) {
    register_module("a", Holder(a));
    register_module("b", Holder(b));
  }
};
TORCH_MODULE(Pair);

// Places the weight and sets a contract of one operator.
struct Placed : ParallelStyle {
  explicit Placed(Placement where, Placement desired = Replicate(), std::string what = "weight",
                  std::string in = "matmul")
      : placement(where), layout(desired), parameter(std::move(what)), op(std::move(in)) {}
  void apply(ApplyContext& context) const override {
    context.place(parameter, placement);
    context.contract(parameter, {.operators = {op}, .input = layout, .desired = layout, .output = {}});
  }
  std::string name() const override { return "Placed"; }
  Placement placement, layout;
  std::string parameter, op;
};

void refused(const ParallelPlan& plan, const std::string& text, const ParallelizeOptions& options = {}) {
  check_refused_on_every_rank({2}, {}, text, [&](const DeviceMesh& mesh) {
    Mlp mlp(8, 6, 8);
    try {
      parallelize_module(mlp, mesh, plan, options);
    } catch (...) {
      for (const at::Tensor& t : mlp->parameters()) CHECK_FALSE(is_dtensor(t));
      throw;
    }
  });
}

template <class MakeModule>
void refused_module(const MakeModule& make, const ParallelPlan& plan, const std::string& text) {
  check_refused_on_every_rank({2}, {}, text, [&](const DeviceMesh& mesh) {
    auto module = make();
    parallelize_module(module, mesh, plan);
  });
}

at::Tensor ones(std::vector<int64_t> shape) { return at::ones(shape); }

}  // namespace

TEST_CASE("plans that do not fit the module") {
  refused({{"upp", ColwiseParallel()}}, "the pattern 'upp' (ColwiseParallel) matches no module");
  refused({{"upp", ColwiseParallel()}}, "and the root's are: up, down. Set options.allow_unmatched");
  refused({{"*.*", ColwiseParallel()}}, "the pattern '*.*'");
  refused({{"up", ColwiseParallel()}, {"u*", RowwiseParallel()}},
          "two styles for up: 'up' gives ColwiseParallel and 'u*' gives RowwiseParallel");
  const Style prepare = PrepareModuleInput({.input_layouts = {Shard(1)}, .desired_input_layouts = {Replicate()}});
  refused({{"u*", prepare}, {"up", prepare}},
          "A Prepare style may be beside another style, but not beside one of its own");
  refused({{"", ColwiseParallel()}}, "ColwiseParallel does not know the module at the root of type");
  refused({{"", RowwiseParallel()}}, "it knows torch::nn::Linear, torch::nn::Embedding and GPT-2's Conv1D");
  refused({{"", ColwiseParallel()}},
          "it knows torch::nn::MultiheadAttention, torch::nn::Linear, torch::nn::Embedding and GPT-2's Conv1D");
  refused({{"", SequenceParallel()}}, "SequenceParallel does not know the module at the root of type");
  refused({{"up", SequenceParallel()}}, "SequenceParallel does not know the module up of type torch::nn::LinearImpl");
  refused({{"up", std::shared_ptr<const ParallelStyle>(
                      std::make_shared<ColwiseParallel>(StyleLayouts{.input_layouts = Partial()}))}},
          "up (ColwiseParallel): an input cannot have placement P(sum)");
  Mlp mlp(8, 6, 8);
  parallelize_module(mlp, fake_mesh(0, {2}), {{"upp", ColwiseParallel()}},
                     {.src_rank = kNoSource, .allow_unmatched = true});
  CHECK(is_dtensor(mlp->up->weight));
}

TEST_CASE("modules that a style does not know") {
  const auto attention = [] { return torch::nn::Sequential(torch::nn::MultiheadAttention(8, 2)); };
  refused_module(attention, {{"0", RowwiseParallel()}},
                 "RowwiseParallel does not know the module 0 of type torch::nn::MultiheadAttention;");
  refused_module(attention, {{"0", SequenceParallel()}}, "SequenceParallel does not know the module 0");
  refused_module(
      attention, {{"0", ColwiseParallel({.input_layouts = Shard(0)})}},
      "0 (ColwiseParallel): a MultiheadAttention reads the sizes of what it is given, so a plain input must be the "
      "whole, not a piece laid out as S(0)");
  refused_module(
      attention, {{"0", ColwiseParallel()}, {"0.out_proj", ColwiseParallel()}},
      "0.out_proj.weight is one tensor: 0 (ColwiseParallel) lays it out as S(1), and 0.out_proj (ColwiseParallel)");
  refused_module([] { return torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({4}))); },
                 {{"0", RowwiseParallel()}},
                 "RowwiseParallel does not know the module 0 of type torch::nn::LayerNormImpl");
  refused_module([] { return torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 4).max_norm(1)); },
                 {{"", ColwiseParallel()}},
                 "the root module (ColwiseParallel): an Embedding with max_norm rewrites whole rows in forward");
  refused_module([] { return torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 4)); }, {{"", SequenceParallel()}},
                 "SequenceParallel does not know the module at the root of type torch::nn::EmbeddingImpl");
}

TEST_CASE("what a style of the user's own may not ask for") {
  refused({{"up", Placed(Shard(0), Replicate(), "wight")}},
          "up (Placed): a torch::nn::LinearImpl has no parameter or buffer 'wight'; it has weight, bias");
  refused({{"up", Placed(Shard(0), Replicate(), "weight", "matmull")}},
          "up.weight (Placed): the operator 'matmull' reads no contracts; those that do are matmul, addmm, embedding, "
          "layer_norm, rms_norm, group_norm, conv2d, add. Elsewhere");
  refused({{"up", Placed(Shard(0), Replicate(), "weight", "bilinear")}}, "the operator 'bilinear' reads no contracts");
  refused({{"up", Placed(Shard(0), Replicate(), "weight", "linear")}}, "the operator 'linear' reads no contracts");
  refused(
      {{"up", Placed(Shard(0), Replicate(), "bias", "add")}},
      "up.bias (Placed): a contract for add is only for a bias that is added to a plain result; set use_local_output");
  refused({{"up", Placed(Shard(2))}}, "up.weight of shape [6, 8] cannot have placement S(2)");
  refused({{"up", Placed(Shard(-3))}}, "cannot have placement S(-3)");
  refused({{"up", Placed(Partial())}}, "cannot have placement P(sum)");
  for (const char* text : {"parallelize_module: down.weight, placed by down (Placed): [RS(1,3,5)] of shape [8, 6]",
                           "cuts 8 elements, but the earlier mesh dimensions leave 6"}) {
    refused({{"up", ColwiseParallel()}, {"down", Placed(RaggedShard(1, {3, 5}))}}, text);
  }
  refused({{"up", ColwiseParallel()}, {"down", Placed(RaggedShard(-1, {2, 2, 2}))}},
          "has 3 parts, but its mesh dimensions have 2 coordinates together");
  CHECK_THROWS_WITH_AS(Style(nullptr), "Style: the style is null; give a ParallelStyle, such as ColwiseParallel()",
                       std::invalid_argument);
}

TEST_CASE("another exception in a user's style fails the job") {
  struct Broken : ParallelStyle {
    void apply(ApplyContext&) const override { throw std::runtime_error("out of ideas"); }
    std::string name() const override { return "Broken"; }
  };
  Mlp mlp(8, 6, 8);
  CHECK_THROWS_WITH_AS(parallelize_module(mlp, fake_mesh(0, {2}), {{"up", Broken()}}), "out of ideas",
                       std::runtime_error);
}

TEST_CASE("Prepare styles need a module that can be hooked, and lists of one length") {
  const Style prepare = PrepareModuleInput({.input_layouts = {Shard(0)}, .desired_input_layouts = {Replicate()}});
  refused({{"up", prepare}}, "up (PrepareModuleInput): the forward of a torch::nn::LinearImpl cannot be hooked");
  refused({{"up", prepare}}, "declare the class with TESSERA_MODULE(Name) of tessera/styles/hooks.h");
  refused({{"", PrepareModuleOutput({.output_layouts = {Shard(0)}, .desired_output_layouts = {Replicate()}})}},
          "the root module (PrepareModuleOutput)");
  CHECK_THROWS_WITH_AS(PrepareModuleInput({.input_layouts = {Shard(0)}, .desired_input_layouts = {}}),
                       "PrepareModuleInput: 1 layouts [S(0)] but 0 desired ones []; give one of each for every tensor, "
                       "std::nullopt to leave one as it is",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(
      PrepareModuleOutput({.output_layouts = {Shard(0)}, .desired_output_layouts = {std::nullopt}}),
      "PrepareModuleOutput: tensor 0 has a layout in [S(0)] and none in [-]; give it a layout in both, or "
      "std::nullopt in both",
      std::invalid_argument);
  CHECK_THROWS_WITH_AS(
      PrepareModuleInputOutput({.input = {.input_layouts = {Shard(0)}, .desired_input_layouts = {}}, .output = {}}),
      doctest::Contains("PrepareModuleInput: 1 layouts [S(0)] but 0 desired ones []"), std::invalid_argument);
}

TEST_CASE(
    "Prepare styles refuse another number of tensors, plain ones with data dimensions, and another mesh, at forward") {
  const auto forward = [](const DeviceMesh& mesh, const Layouts& from, const Layouts& to) {
    Mlp2 m(8, 6, 8);
    auto tp = parallelize_module(m, mesh, PrepareModuleInput({.input_layouts = from, .desired_input_layouts = to}),
                                 {.src_rank = kNoSource});
    tp(ones({2, 8}));
  };
  check_refused_on_every_rank({2}, {}, "PrepareModuleInput of the root module: 2 layouts [-, S(0)] for 1 tensors",
                              [&](const DeviceMesh& mesh) {
                                forward(mesh, {std::nullopt, Shard(0)}, {std::nullopt, Replicate()});
                              });
  check_refused_on_every_rank({2}, {}, "PrepareModuleInput of the root module: 0 layouts [] for 1 tensors",
                              [&](const DeviceMesh& mesh) { forward(mesh, {}, {}); });
  CHECK_NOTHROW(forward(fake_mesh(0, {2}), {Shard(0), std::nullopt}, {Replicate(), std::nullopt}));
  const Style one = PrepareModuleInput({.input_layouts = {Shard(0)}, .desired_input_layouts = {Replicate()}});
  check_refused_on_every_rank({2, 2}, {"dp", "tp"},
                              "tensor 0 is plain, and on a mesh with data dimensions nobody can know",
                              [&](const DeviceMesh& mesh) {
                                Mlp2 m(8, 6, 8);
                                auto tp = parallelize_module(m, mesh, one, {.src_rank = kNoSource});
                                tp(ones({2, 8}));
                              });
  check_refused_on_every_rank({2}, {}, "but the module is on", [&](const DeviceMesh& mesh) {
    Mlp2 m(8, 6, 8);
    auto tp = parallelize_module(m, mesh, one, {.src_rank = kNoSource});
    const DeviceMesh other(mesh.world_ptr(), at::kCPU, Mesh({2}, {"other"}));
    tp(from_local(ones({2, 8}), other, {Shard(0)}));
  });
}

TEST_CASE("stages and dimensions of ZeRO without data_placement") {
  const std::vector<int64_t> first = {0};
  refused({}, "zero_stage 1 without data_placement", {.zero_stage = 1});
  refused({}, "zero_stage 2 without data_placement", {.data_placement = Replicate(), .zero_stage = 2});
  refused({}, "shard_dims [0] without data_placement", {.shard_dims = first});
  refused({}, "list the mesh dimensions that split the batch in options.data_dims", {.data_placement = Shard(0)});
}

TEST_CASE("embeddings with sparse(true), with a style and without, unless they are frozen") {
  const auto sparse = [] { return torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 4).sparse(true)); };
  refused_module(sparse, {}, "the root module has sparse(true), and a DTensor cannot have a sparse");
  refused_module([] { return torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(8, 4).sparse(true)); }, {},
                 "the root module has sparse(true), and a DTensor cannot have a sparse gradient");
  refused_module(sparse, {{"", RowwiseParallel()}}, "give sparse(false), set requires_grad of its weight to false");
  torch::nn::Embedding frozen = sparse();
  frozen->weight.set_requires_grad(false);
  parallelize_module(frozen, fake_mesh(0, {2}), RowwiseParallel(), {.src_rank = kNoSource});
  CHECK(placements_of(frozen->weight) == Placements{Shard(0)});
}

TEST_CASE("a plain input with all features, where the style takes it for this rank's piece of them") {
  const auto forward = [](const DeviceMesh& mesh, int64_t features, const at::Tensor& x) {
    Linear module(features, 4);
    parallelize_module(module, mesh, RowwiseParallel(), {.src_rank = kNoSource});
    module->forward(x);
  };
  check_refused_on_every_rank(
      {2}, {"tp"},
      "addmm with weight (RowwiseParallel): a plain input counts as this rank's piece S(-1), of "
      "6 of the 12 features that the product sums over, and [2, 12] has 12; if it is the whole, "
      "give the style input_layouts = Replicate()",
      [&](const DeviceMesh& mesh) {
        forward(mesh, 12, ones({2, 12}));
      });
  check_refused_on_every_rank({2}, {"tp"}, "matmul with weight (RowwiseParallel): a plain input counts as",
                              [&](const DeviceMesh& mesh) {
                                forward(mesh, 12, ones({2, 3, 12}));
                              });
  check_refused_on_every_rank({2}, {"tp"}, "of the 13 features that the product sums over, and [2, 13] has 13",
                              [&](const DeviceMesh& mesh) {
                                forward(mesh, 13, ones({2, 13}));
                              });
  CHECK_NOTHROW(forward(fake_mesh(1, {2}, {"tp"}), 12, ones({2, 6})));
  CHECK_NOTHROW(forward(fake_mesh(1, {2}, {"tp"}), 13, ones({2, 6})));
}

TEST_CASE("meshes and options that do not fit") {
  const auto on_grid = [](const std::vector<std::string>& names, const ParallelizeOptions& options,
                          const std::string& text) {
    check_refused_on_every_rank({2, 2}, names, text, [&](const DeviceMesh& mesh) {
      Mlp mlp(8, 6, 8);
      parallelize_module(mlp, mesh, {{"up", ColwiseParallel()}}, options);
    });
  };
  on_grid({}, {}, "the mesh (2, 2) has 2 dimensions and none called tp; give options.tensor_dim");
  on_grid({"a", "b"}, {}, "give options.tensor_dim");
  on_grid({}, {.tensor_dim = 2}, "2");
  on_grid({}, {.tensor_dim = 1, .data_dims = {{1}}}, "name mesh dimension 1, which is the tensor dimension");
  on_grid({}, {.tensor_dim = 1, .data_dims = {{0, -2}}},
          "options.data_dims: mesh dimension 0 of mesh (2, 2) appears twice in (0, -2)");
  on_grid({"a", "b"}, {.tensor_dim = "b", .data_dims = {{"a", "b"}}},
          "name mesh dimension b, which is the tensor dimension");
  on_grid({"a", "b"}, {.tensor_dim = "c"},
          "options.tensor_dim: mesh {a: 2, b: 2} has no mesh dimension 'c'; there are: a, b");
  on_grid({"a", "b"}, {.tensor_dim = "b", .data_dims = {{"dp"}}}, "options.data_dims: mesh {a: 2, b: 2} has no mesh");
  on_grid({"dp", "tp"}, {.src_rank = 4}, "src_rank 4 is not on the mesh");
  on_grid({"dp", "tp"}, {.optimizers = {nullptr}}, "options.optimizers holds a null pointer");
}

TEST_CASE("tied tensors on which styles disagree") {
  const auto tied = [] {
    const at::Tensor shared = ones({4, 4});
    return Pair(shared, shared);
  };
  refused_module(tied, {{"a", Placed(Shard(0))}, {"b", Placed(Shard(1))}},
                 "a.weight and b.weight are one tensor: a (Placed) lays it out as S(0), and b (Placed) as S(1)");
  refused_module(
      tied, {{"a", Placed(Shard(0), Shard(1))}, {"b", Placed(Shard(0), Shard(0))}},
      "a.weight and b.weight are one tensor, and their styles say different layouts for the operator 'matmul'");
}

TEST_CASE("parameters that cannot be converted") {
  const at::Tensor memory = ones({4, 4});
  refused_module([&] { return Pair(memory.slice(0, 0, 3), memory.slice(0, 1, 4)); }, {{"a", Placed(Shard(0))}},
                 "a.weight and b.weight view overlapping parts of one storage");
  refused_module([&] { return Pair(memory, memory.t()); }, {}, "give each its own memory (clone)");
  refused_module([&] { return Pair(memory, memory.detach()); }, {{"a", Placed(Shard(0))}},
                 "a.weight and b.weight share their memory, but would have placements [S(0)] and [R]");
  refused_module([&] { return Holder(ones({4}).to_sparse()); }, {},
                 "weight is sparse; only dense tensors have a layout over ranks");
  const auto with_sparse_gradient = [] {
    const at::Tensor weight = ones({4}).set_requires_grad(true);
    weight.mutable_grad() = ones({4}).to_sparse();
    return Holder(weight);
  };
  refused_module(with_sparse_gradient, {}, "weight has a sparse gradient; call zero_grad() on the module first");
  refused_module([&] { return Holder(at::ones({4}, at::kMeta)); }, {}, "weight is on the meta device, without values");
  refused_module([&] { return Holder(ones({4}).set_requires_grad(true) * 2); }, {},
                 "weight is the result of an operator, not a leaf");
  Pair apart(memory.slice(0, 0, 2), memory.slice(0, 2, 4));
  parallelize_module(apart, fake_mesh(0, {2}), {}, {.src_rank = kNoSource});
}

TEST_CASE("a parameter that another call has laid out") {
  check_refused_on_every_rank({2}, {}, "up (RowwiseParallel): the parameter up.weight is a DTensor already",
                              [&](const DeviceMesh& mesh) {
                                Mlp mlp(8, 6, 8);
                                parallelize_module(mlp, mesh, {{"up", ColwiseParallel()}}, {.src_rank = kNoSource});
                                parallelize_module(mlp, mesh, {{"up", RowwiseParallel()}}, {.src_rank = kNoSource});
                              });
  Mlp mlp(8, 6, 8);
  const DeviceMesh mesh = fake_mesh(0, {2});
  parallelize_module(mlp->up, mesh, ColwiseParallel(), {.src_rank = kNoSource});
  parallelize_module(mlp, mesh, {{"down", RowwiseParallel()}}, {.src_rank = kNoSource});
  CHECK(placements_of(mlp->up->weight) == Placements{Shard(0)});
  CHECK(placements_of(mlp->down->weight) == Placements{Shard(1)});
}

TEST_CASE("an optimizer that holds state already") {
  check_refused_on_every_rank(
      {2}, {}, "an optimizer holds state for up.weight, laid out as the parameter is now; parallelize",
      [&](const DeviceMesh& mesh) {
        Mlp mlp(8, 6, 8);
        torch::optim::SGD sgd(mlp->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        mlp->forward(ones({2, 8})).sum().backward();
        sgd.step();
        parallelize_module(mlp, mesh, {{"up", ColwiseParallel()}}, {.src_rank = kNoSource, .optimizers = {&sgd}});
      });
  Mlp mlp(8, 6, 8);
  torch::optim::SGD fresh(mlp->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  parallelize_module(mlp, fake_mesh(0, {2}), {}, {.src_rank = kNoSource, .optimizers = {&fresh}});
  CHECK(is_dtensor(fresh.param_groups().at(0).params().at(0)));
  // A parameter that is a DTensor already keeps its layout, so the state of its optimizer stays right.
  for (at::Tensor& p : mlp->parameters()) p.mutable_grad() = at::zeros_like(p);
  fresh.step();
  REQUIRE(fresh.state().size() == 4);
  mlp->register_module("head", torch::nn::Linear(8, 4));
  parallelize_module(mlp, fake_mesh(0, {2}), {{"head", ColwiseParallel()}},
                     {.src_rank = kNoSource, .optimizers = {&fresh}});
}

TEST_CASE("a bias added to a plain piece of the batch that is no product of its own layer, unless without gradients") {
  const auto forward = [](const DeviceMesh& mesh, double scale) {
    Mlp mlp(8, 6, 8);
    parallelize_module(mlp, mesh, {{"up", ColwiseParallel({.use_local_output = true})}}, {.src_rank = kNoSource});
    const at::Tensor x = from_local(at::ones({1, 3, 8}), mesh, {Shard(0), Replicate()});
    const at::Tensor product = x.matmul(mlp->up->weight.t());
    (scale == 1 ? product : product * scale) + mlp->up->bias;
  };
  check_refused_on_every_rank({2, 2}, {"dp", "tp"}, "how the bias's gradient is summed. Add the bias to the product",
                              [&](const DeviceMesh& mesh) { forward(mesh, 2); });
  forward(fake_mesh(0, {2, 2}, {"dp", "tp"}), 1);
  const at::NoGradGuard no_grad;
  forward(fake_mesh(0, {2, 2}, {"dp", "tp"}), 2);
}

TEST_CASE("distribute_module: hooks need a module that has them") {
  Mlp mlp(8, 6, 8);
  CHECK_THROWS_WITH_AS(distribute_module(*mlp, fake_mesh(0, {2}), {}, {.input_fn = [](std::vector<at::Tensor>&) {}}),
                       doctest::Contains("distribute_module: input_fn and output_fn wrap forward, and a "),
                       std::invalid_argument);
  CHECK_FALSE(is_dtensor(mlp->up->weight));
}
