// Holds the C++ of README.md, docs/getting-started.md, docs/meshes.md, docs/redistribution.md, docs/large-models.md,
// docs/converting-weights.md and docs/styles.md that is in no program: docs_test compares them.

#include <chrono>
#include <filesystem>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/script.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/dtensor/deferred/sharded_init.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/name_pattern.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/dtensor/measured_costs.h"
#include "tessera/dtensor/random.h"
#include "tessera/examples/language_model/llama.h"
#include "tessera/examples/language_model/transformer_options.h"
#include "tessera/examples/language_model/weight_rules.h"
#include "tessera/mesh/backends/backend_group.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/plan.h"
#include "tessera/placement/planner/plan_redistribute.h"
#include "tessera/styles/parallelize.h"
#include "tessera/styles/script_module.h"
#include "tessera/tests/docs/mlp.h"
#include "tessera/tests/harness/ranks.h"

TESSERA_RANKS_TEST_CASE("README.md: an MLP on four ranks", {4}) {
  const at::Tensor x = torch::ones({2, 16});
  const at::Tensor whole = [&] {
    Mlp model;
    const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {4}, {"tp"});
    auto tp = tessera::parallelize_module(model, mesh,
                                          {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}});
    torch::optim::AdamW optimizer(model->parameters());

    const at::Tensor y = tp(x);  // x: a plain tensor, the same on every rank; y: a DTensor
    y.square().mean().backward();
    optimizer.step();
    return tessera::full_tensor(tp(x));  // plain, whole, on every rank
  }();
  CHECK(whole.sizes() == at::IntArrayRef({2, 16}));
  CHECK_FALSE(tessera::is_dtensor(whole));
}

TESSERA_RANKS_TEST_CASE("a parallel MLP gives the plain one's numbers", {1, 2, 4}) {
  torch::manual_seed(0);
  Mlp plain, model;
  {
    const torch::NoGradGuard no_grad;
    const auto to = model->parameters(), from = plain->parameters();
    for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  }
  const int64_t size = tessera::testing::world_size();
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {size}, {"tp"}, tessera::testing::world());
  auto tp = tessera::parallelize_module(model, mesh,
                                        {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}});
  const at::Tensor x = torch::randn({8, 16});
  CHECK(torch::allclose(tessera::full_tensor(tp(x)), plain(x), 1e-5, 1e-6));
}

namespace {

struct AttentionImpl : torch::nn::Module {
  AttentionImpl()
      : wq(register_module("wq", torch::nn::Linear(8, 8))),
        wk(register_module("wk", torch::nn::Linear(8, 8))),
        wv(register_module("wv", torch::nn::Linear(8, 8))),
        wo(register_module("wo", torch::nn::Linear(8, 8))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = [&](const at::Tensor& t) { return t.view({t.size(0), t.size(1), 4, 2}).transpose(1, 2); };
    const at::Tensor y = torch::scaled_dot_product_attention(heads(wq(x)), heads(wk(x)), heads(wv(x)));
    return wo(y.transpose(1, 2).reshape(x.sizes()));
  }
  torch::nn::Linear wq, wk, wv, wo;
};
TORCH_MODULE(Attention);

struct LayerImpl : torch::nn::Module {
  LayerImpl() : attn(register_module("attn", Attention())), mlp(register_module("mlp", Mlp())) {}
  at::Tensor forward(const at::Tensor& x) { return mlp(torch::cat({x, attn(x)}, -1)).slice(-1, 0, 8); }
  Attention attn;
  Mlp mlp;
};
TORCH_MODULE(Layer);

struct ModelImpl : torch::nn::Module {
  ModelImpl()
      : tok(register_module("tok", torch::nn::Embedding(10, 8))),
        layers(register_module("layers", torch::nn::Sequential(Layer(), Layer()))) {}
  at::Tensor forward(const at::Tensor& ids) { return layers->forward(tok(ids)); }
  torch::nn::Embedding tok;
  torch::nn::Sequential layers;
};
TORCH_MODULE(Model);

}  // namespace

TESSERA_RANKS_TEST_CASE("docs/styles.md: names with wildcards", {4}) {
  Model model;
  const at::Tensor ids = torch::arange(6).view({2, 3});
  const auto forward = [&] {
    const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {4}, {"tp"});
    auto tp = tessera::parallelize_module(model, mesh,
                                          {{"tok", tessera::RowwiseParallel()},
                                           {"layers.*.attn.w[qkv]", tessera::ColwiseParallel()},
                                           {"layers.*.attn.wo", tessera::RowwiseParallel()},
                                           {"layers.*.mlp.up", tessera::ColwiseParallel()},
                                           {"layers.*.mlp.down", tessera::RowwiseParallel()}});
    const at::Tensor y = tp(ids);  // forward; tp->eval() and the rest reach the module
    return y;
  };
  CHECK(forward().sizes() == at::IntArrayRef({2, 3, 8}));
}

TESSERA_RANKS_TEST_CASE("docs/styles.md: a transformer encoder by heads", {2}) {
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2}, {"tp"}, tessera::testing::world());
  const auto layer = torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12);
  torch::nn::TransformerEncoder encoder(torch::nn::TransformerEncoderOptions(layer, 1));
  auto tp = tessera::parallelize_module(encoder, mesh,
                                        {{"layers.*.self_attn", tessera::ColwiseParallel()},
                                         {"layers.*.linear1", tessera::ColwiseParallel()},
                                         {"layers.*.linear2", tessera::RowwiseParallel()}});
  CHECK(tp(torch::ones({3, 2, 8})).sizes() == at::IntArrayRef({3, 2, 8}));
}

namespace {

constexpr int64_t kDim = 8, kHeads = 4;

struct CausalAttentionImpl : torch::nn::Module {
  CausalAttentionImpl() {
    for (torch::nn::Linear* linear : {&wq, &wk, &wv, &wo}) *linear = torch::nn::Linear(kDim, kDim);
    register_module("wq", wq), register_module("wk", wk), register_module("wv", wv), register_module("wo", wo);
  }

  at::Tensor forward(const at::Tensor& x) {  // [batch, length, kDim] -> [batch, length, kDim]
    const auto heads = [&](const at::Tensor& t) { return t.view({x.size(0), x.size(1), kHeads, -1}).transpose(1, 2); };
    const at::Tensor y =
        at::scaled_dot_product_attention(heads(wq(x)), heads(wk(x)), heads(wv(x)), /*attn_mask=*/std::nullopt,
                                         /*dropout_p=*/0.0, /*is_causal=*/true);
    return drop(wo(y.transpose(1, 2).flatten(2)));
  }

  torch::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};
  torch::nn::Dropout drop{0.0};
};
TORCH_MODULE(CausalAttention);

}  // namespace

TESSERA_RANKS_TEST_CASE("docs/styles.md: attention whose code knows nothing of the ranks", {2, 3, 4}) {
  torch::manual_seed(0);
  CausalAttention attention;
  const at::Tensor x = torch::randn({2, 5, kDim}), want = attention(x).detach();
  const tessera::DeviceMesh mesh =
      tessera::init_device_mesh("cpu", {tessera::testing::world_size()}, {"tp"}, tessera::testing::world());
  auto tp = tessera::parallelize_module(attention, mesh,
                                        {{"w[qkv]", tessera::ColwiseParallel()}, {"wo", tessera::RowwiseParallel()}});
  CHECK(torch::allclose(tessera::full_tensor(tp(x)), want, 1e-4, 1e-5));
}

TESSERA_RANKS_TEST_CASE("docs/styles.md: two mesh dimensions", {4}) {
  Mlp model;
  const at::Tensor piece = torch::ones({2, 16});
  const tessera::ParallelPlan plan = {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}};
  const auto step = [&] {
    const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    auto tp = tessera::parallelize_module(model, mesh, plan);  // styles cut over tp; dp cuts the batch
    const at::Tensor x = tessera::from_local(piece, mesh, {tessera::Shard(0), tessera::Replicate()});
    tp(x)
        .square()
        .mean()
        .backward();  // the mean over the whole batch; gradients are reduced over dp as they reach their parameter
  };
  step();
  CHECK(tessera::is_dtensor(model->up->weight.grad()));
}

TESSERA_RANKS_TEST_CASE("docs/large-models.md: built in shards", {4}) {
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {4}, {"tp"});
  const tessera::ParallelPlan plan = {{"layers.*.mlp.up", tessera::ColwiseParallel()}};
  tessera::manual_seed(1, mesh.world());
  std::optional<tessera::ShardedInit> init(std::in_place, mesh);
  Model model;  // no memory so far
  init.reset();
  auto tp = tessera::parallelize_module(model, mesh, plan);
  CHECK(tessera::is_dtensor(model->tok->weight));
  CHECK(tessera::to_local(model->tok->weight.detach()).abs().sum().item<double>() > 0);
}

TESSERA_RANKS_TEST_CASE("docs/large-models.md: ZeRO-3", {4}) {
  Mlp model;
  const tessera::ParallelPlan plan = {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}};
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
  auto zero = tessera::parallelize_module(model, mesh, plan, {.data_placement = tessera::Shard(0)});
  torch::optim::AdamW optimizer(model->parameters());
  zero(tessera::from_local(torch::ones({2, 16}), mesh, {tessera::Shard(0), tessera::Replicate()}))
      .square()
      .mean()
      .backward();
  optimizer.step();
  CHECK(tessera::placements_of(model->up->weight.grad()) ==
        tessera::Placements{tessera::Shard(0).ordered(1), tessera::Shard(0)});
}

TESSERA_RANKS_TEST_CASE("docs/large-models.md: ZeRO-2", {4}) {
  Mlp model;
  const tessera::ParallelPlan plan = {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}};
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
  auto stage_two =
      tessera::parallelize_module(model, mesh, plan, {.data_placement = tessera::Shard(0), .zero_stage = 2});
  const at::Tensor x = tessera::from_local(torch::ones({2, 16}), mesh, {tessera::Shard(0), tessera::Replicate()});
  stage_two(x).square().mean().backward();
  CHECK(tessera::placements_of(model->up->weight.grad()) ==
        tessera::Placements{tessera::Shard(0).ordered(1), tessera::Shard(0)});
}

TESSERA_RANKS_TEST_CASE("docs/styles.md: TorchScript", {2}) {
  const std::string file = "script_of_rank_" + std::to_string(tessera::testing::rank()) + ".pt";
  torch::jit::Module made("Scale");
  made.register_attribute("training", c10::BoolType::get(), true);
  made.register_parameter("weight", torch::full({4}, 2.0), /*is_buffer=*/false);
  made.define("def forward(self, x):\n  return x * self.weight\n");
  made.save(file);
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2}, {"tp"});
  const tessera::ParallelPlan plan;
  const at::Tensor x = torch::ones({3, 4});
  torch::jit::Module script = torch::jit::load(file);
  auto tp = tessera::parallelize_module(script, mesh, plan);
  const at::Tensor y = tp(x).toTensor();
  CHECK(torch::equal(tessera::full_tensor(y), torch::full({3, 4}, 2.0)));
  torch::nn::init::constant_(tessera::to_local(script.attr("weight").toTensor()), 3);  // as if trained
  const std::string path = "script_weights.safetensors";
  const auto weights = tessera::weights_of(script);
  torch::optim::AdamW optimizer(weights->parameters());
  tessera::save_weights(*weights, path);
  const std::string trained_file = "trained_" + file;
  torch::jit::Module whole = torch::jit::load(file);
  tessera::load_weights(*tessera::weights_of(whole), path);
  whole.save(trained_file);
  CHECK(torch::equal(torch::jit::load(trained_file).forward({x}).toTensor(), torch::full({3, 4}, 3.0)));
}

TESSERA_RANKS_TEST_CASE("docs/meshes.md: slices, and mesh dimensions merged or split", {4}) {
  const at::Tensor x = torch::full({3}, static_cast<double>(tessera::testing::rank()));
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2, 2}, {"dp", "tp"});

  const tessera::DeviceMesh tp = mesh["tp"];  // {tp: 2}: the ranks that differ from this one on tp alone
  const tessera::DeviceMesh both = mesh.merged({"dp", "tp"});  // {dp+tp: 4}: one group over both mesh dimensions
  const at::Tensor total = tessera::all_reduce(x, both, 0, tessera::ReduceOp::kSum);

  const tessera::DeviceMesh flat = mesh.flatten({"dp", "tp"}, "all");             // {all: 4}
  const tessera::DeviceMesh split = flat.unflatten("all", {2, 2}, {"dp", "tp"});  // mesh again
  const tessera::DeviceMesh turned = mesh.concatenate({mesh["tp"], mesh["dp"]});  // {tp: 2, dp: 2}
  CHECK(tp.mesh().names() == std::vector<std::string>{"tp"});
  CHECK(tp.size() == 2);
  CHECK(both.mesh() == tessera::Mesh({4}, {"dp+tp"}));
  CHECK(torch::equal(total, torch::full({3}, 6.0)));
  CHECK(flat.mesh() == tessera::Mesh({4}, {"all"}));
  CHECK(split == mesh);
  CHECK(turned.mesh() == tessera::Mesh({2, 2}, {"tp", "dp"}, {0, 2, 1, 3}));
  CHECK(mesh.merged({1, 0}).mesh().ranks() == std::vector<int64_t>{0, 2, 1, 3});
}

TESSERA_RANKS_TEST_CASE("docs/meshes.md: options of a mesh dimension", {4}) {
  using namespace std::chrono_literals;
  const tessera::DeviceMesh patient = tessera::init_device_mesh(
      "cpu", {2, 2}, {"dp", "tp"}, nullptr, {{"dp", {.timeout = 10min}}, {"tp", {.timeout = 30s, .backend = "gloo"}}});
  CHECK(patient.group("dp")->getBackendOptions()->timeout == 10min);
  CHECK(patient.group("tp")->getBackendOptions()->timeout == 30s);
}

namespace {

c10::intrusive_ptr<c10d::Backend> group_of_two(int64_t first, int64_t second) {
  const std::string name = std::to_string(first) + "-" + std::to_string(second);
  const auto store = c10::make_intrusive<c10d::PrefixStore>(name, tessera::testing::world()->store());
  const int place = tessera::testing::rank() == first ? 0 : 1;
  const auto group = tessera::make_gloo_group({.store = store, .rank = place, .size = 2, .one_host = true}).backend;
  group->barrier(c10d::BarrierOptions())->wait();  // none ends before the other has connected
  return group;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("docs/meshes.md: groups that you have made", {4}) {
  const int64_t rank = tessera::testing::rank();
  const auto dp_group = group_of_two(rank % 2, rank % 2 + 2), tp_group = group_of_two(rank / 2 * 2, rank / 2 * 2 + 1);
  // dp_group and tp_group: c10::intrusive_ptr<c10d::Backend>, of which this rank is a member
  const tessera::DeviceMesh wrapped =
      tessera::DeviceMesh::from_group({dp_group, tp_group}, "cpu", tessera::Mesh({2, 2}, {"dp", "tp"}));
  CHECK(wrapped.group("dp") == dp_group);
  CHECK(wrapped.group("tp") == tp_group);
}

TESSERA_RANKS_TEST_CASE("docs/redistribution.md: a plan", {1}) {
  const tessera::Mesh mesh({2, 4}, {"dp", "tp"});
  const tessera::Plan plan =
      tessera::plan_redistribute({1024, 1024}, at::kFloat, mesh, {tessera::Shard(0), tessera::Replicate()},
                                 {tessera::Replicate(), tessera::Shard(0)});
  const std::string text = plan.to_string();
  CAPTURE(text);
  CHECK(text.find("permute on dp: [S(0), R] -> [R, S(0)], ") == 0);
}

TESSERA_RANKS_TEST_CASE("docs/redistribution.md: begun, together, in another dtype, to another mesh", {4}) {
  const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, tessera::testing::world());
  const tessera::DeviceMesh line = tessera::init_device_mesh("cpu", {4}, {"tp"}, tessera::testing::world());
  const at::Tensor t = tessera::distribute_tensor(torch::ones({64, 64}), mesh, {tessera::Shard(0), tessera::Shard(1)});
  const at::Tensor w = tessera::distribute_tensor(torch::eye(8), line, {tessera::Shard(0)});
  const at::Tensor x = tessera::distribute_tensor(torch::ones({4, 8}), line, {tessera::Replicate()});
  {
    const at::Tensor weight = tessera::redistribute(w, {tessera::Replicate()}, {.async = true});  // returns at once
    const at::Tensor h = torch::relu(x);                                                          // meanwhile
    const at::Tensor y = torch::matmul(h, weight);                                                // waits
    CHECK(torch::equal(tessera::full_tensor(y), torch::ones({4, 8})));
  }
  const std::vector<at::Tensor> whole =
      tessera::redistribute_many({w, x}, {{tessera::Replicate()}, {tessera::Shard(1)}});
  CHECK(torch::equal(tessera::full_tensor(whole[0]), torch::eye(8)));
  const at::Tensor compute = tessera::redistribute(w, {tessera::Replicate()}, {.forward_dtype = at::kBFloat16});
  CHECK((compute.scalar_type() == at::kBFloat16));

  const tessera::CostModel costs = tessera::measured_costs(line);
  const at::Tensor by_columns = tessera::redistribute(w, {tessera::Shard(1)}, {.cost_model = costs});
  CHECK(torch::equal(tessera::full_tensor(by_columns), torch::eye(8)));

  const tessera::DeviceMesh pair(mesh.world_ptr(), c10::DeviceType::CPU, tessera::Mesh({2}, {"stage"}, {2, 3}));
  const at::Tensor there = tessera::redistribute_to(t, pair, {tessera::Shard(0)});  // ranks 0 and 1 hold nothing of it
  CHECK(tessera::to_local(there).numel() == (pair.is_member() ? 32 * 64 : 0));
}

namespace {

// Has the names of examples/language_model/transformer.h, and one layer.
struct OfGpt2Impl : torch::nn::Module {
  OfGpt2Impl() {
    tok = register_module("tok", torch::nn::Embedding(10, 8));
    pos = register_module("pos", torch::nn::Embedding(6, 8));
    const auto layer = std::make_shared<torch::nn::Module>();
    const auto attn = layer->register_module("attn", std::make_shared<torch::nn::Module>());
    for (const char* const name : {"wq", "wk", "wv", "wo"}) attn->register_module(name, torch::nn::Linear(8, 8));
    const auto mlp = layer->register_module("mlp", std::make_shared<torch::nn::Module>());
    mlp->register_module("up", torch::nn::Linear(8, 32));
    mlp->register_module("down", torch::nn::Linear(32, 8));
    const torch::nn::LayerNormOptions norm({8});
    for (const char* const name : {"norm1", "norm2"}) layer->register_module(name, torch::nn::LayerNorm(norm));
    register_module("layers", std::make_shared<torch::nn::Module>())->register_module("0", layer);
    register_module("norm", torch::nn::LayerNorm(norm));
    register_module("head", torch::nn::Linear(torch::nn::LinearOptions(8, 10).bias(false)));
  }
  torch::nn::Embedding tok{nullptr}, pos{nullptr};
};
TORCH_MODULE(OfGpt2);

// Has what GPT-2's file has, of one layer.
struct Gpt2File : torch::nn::Module {
  Gpt2File() {
    const auto norm = [] { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})); };
    const auto conv1d = [](int64_t in, int64_t out) {
      auto module = std::make_shared<torch::nn::Module>();
      module->register_parameter("weight", torch::ones({in, out}));
      module->register_parameter("bias", torch::ones({out}));
      return module;
    };
    register_module("wte", torch::nn::Embedding(10, 8));
    register_module("wpe", torch::nn::Embedding(6, 8));
    const auto layer = std::make_shared<torch::nn::Module>();
    const auto attn = layer->register_module("attn", std::make_shared<torch::nn::Module>());
    attn->register_module("c_attn", conv1d(8, 24));
    attn->register_module("c_proj", conv1d(8, 8));
    const auto mlp = layer->register_module("mlp", std::make_shared<torch::nn::Module>());
    mlp->register_module("c_fc", conv1d(8, 32));
    mlp->register_module("c_proj", conv1d(32, 8));
    layer->register_module("ln_1", norm());
    layer->register_module("ln_2", norm());
    register_module("h", std::make_shared<torch::nn::Module>())->register_module("0", layer);
    register_module("ln_f", norm());
  }
};

}  // namespace

TESSERA_RANKS_TEST_CASE("docs/converting-weights.md: rules", {1}) {
  const std::string folder = std::filesystem::path(tessera::testing::store_path()).parent_path() / "gpt2";
  std::filesystem::create_directories(folder);
  tessera::save_weights(Gpt2File(), folder);
  OfGpt2 model;
  tessera::load_weights(*model, folder, {.rules = gpt2_rules(), .convert_dtype = true});
  CHECK(model->named_parameters()["layers.0.attn.wk.weight"].eq(1).all().item<bool>());

  const tessera::WeightRules rules = {
      .rules = {{"layers.*.norm.*", tessera::from_file("h.*.ln_1.*")},
                {"layers.*.up.weight", tessera::from_file("h.*.mlp.c_fc.weight").transpose(0, 1)},
                {"layers.*.up.bias", tessera::from_file("h.*.mlp.c_fc.bias")}},
      .ignored = {"h.*.attn.bias"}};
  CHECK(tessera::to_string(rules).find("\"layers.*.up.bias\" <- from_file(") != std::string::npos);

  CHECK_THROWS_WITH_AS(
      tessera::load_weights(*model, folder, {.rename = [](const std::string& name) { return name; }, .rules = rules}),
      doctest::Contains("`rename` and `rules` are given"), std::invalid_argument);
  CHECK(tessera::captures("layers.*.weight", "layers.0.attn.wq.weight") == std::vector<std::string>{"0.attn.wq"});

  const TransformerOptions options = {
      .vocabulary = 50257, .hidden = 768, .layers = 12, .heads = 12, .sequence = 1024, .tied = true, .gelu = "tanh"};
  CHECK(options.gelu != TransformerOptions().gelu);

  const int64_t heads = 4;
  const tessera::WeightSource first = tessera::from_file("h.*.c_attn.weight").split(1, 0, 3).transpose(0, 1);
  const tessera::WeightSource all =
      tessera::fuse(0, {tessera::from_file("*.q"), tessera::from_file("*.k"), tessera::from_file("*.v")});
  const tessera::WeightSource neighbours =
      tessera::from_file("*.q_proj").unflatten(0, {heads, 2, -1}).transpose(1, 2).flatten(0, 2);
  std::cout << tessera::to_string(first) << '\n';  // from_file("h.*.c_attn.weight").split(1, 0, 3).transpose(0, 1)
  CHECK(tessera::to_string(first) == R"(from_file("h.*.c_attn.weight").split(1, 0, 3).transpose(0, 1))");
  CHECK(all.file_names().size() == 3);
  CHECK(neighbours.steps().size() == 3);
}

TEST_CASE("Llama's options of the page: the slowest rotation is slowed by the factor, and the fastest is not") {
  const LlamaOptions options = {
      .vocabulary = 128256,
      .hidden = 2048,
      .intermediate = 8192,
      .layers = 16,
      .heads = 32,
      .key_value_heads = 8,
      .rotary_base = 500000.0,
      .rotary_scaling = LlamaRotaryScaling{.factor = 32.0, .low = 1.0, .high = 4.0, .length = 8192.0},
      .norm_epsilon = 1e-5,
      .tied = true};
  LlamaOptions small = options;
  small.vocabulary = 11;
  small.intermediate = 2;
  small.layers = 1;
  Llama scaled(small);
  small.rotary_scaling.reset();
  Llama plain(small);
  const at::Tensor ratio = scaled->speeds(at::kDouble) / plain->speeds(at::kDouble);
  CHECK(ratio.size(0) == 32);
  CHECK(ratio[0].item<double>() == 1);
  CHECK(ratio[31].item<double>() == doctest::Approx(1.0 / 32));
}
