// The C++ of README.md, docs/getting-started.md and docs/styles.md that stands in no program: docs_test compares them.

#include <string>

#include <torch/torch.h>

#undef CHECK  // c10's
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/docs/mlp.h"
#include "tessera/tests/harness/ranks.h"

TESSERA_RANKS_TEST_CASE("README.md: an MLP on four ranks", {4}) {
  const at::Tensor x = torch::ones({2, 16});
  const at::Tensor whole = [&] {
    Mlp model;
    const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {4}, {"tp"});
    auto tp =
        tessera::parallelize_module(model, mesh, {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}});
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
  auto tp =
      tessera::parallelize_module(model, mesh, {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}});
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

TESSERA_RANKS_TEST_CASE("docs/styles.md: two mesh dimensions", {4}) {
  Mlp model;
  const at::Tensor piece = torch::ones({2, 16});
  const tessera::ParallelPlan plan = {{"up", tessera::ColwiseParallel()}, {"down", tessera::RowwiseParallel()}};
  const auto step = [&] {
    const tessera::DeviceMesh mesh = tessera::init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    auto tp = tessera::parallelize_module(model, mesh, plan);  // tensor_dim is "tp"; data_dims are all others
    const at::Tensor x = tessera::from_local(piece, mesh, {tessera::Shard(0), tessera::Replicate()});
    tp(x)
        .square()
        .mean()
        .backward();  // the mean over the whole batch; gradients are reduced over dp as they reach their parameter
  };
  step();
  CHECK(tessera::is_dtensor(model->up->weight.grad()));
}
