#include "tessera/layers/parallel_dim.h"

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/layers/parallel_attributes.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/mesh/recorder.h"
#include "tessera/tests/dtensor/thrown.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/layers/counted.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

const std::vector<ParallelDim> kDims = {std::nullopt, 0, 1, -1};

}  // namespace

TESSERA_RANKS_TEST_CASE("a stack of ParallelLinear of all dims equals torch::nn::Linear", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  manual_seed(1, mesh.world());
  std::vector<ParallelLinear> layers;
  std::vector<at::Tensor> weights, biases;
  int64_t width = 8;
  for (int i = 0; i < 12; ++i) {
    const int64_t next = i % 2 == 0 ? 16 : 8;
    layers.emplace_back(
        width, next, mesh,
        ParallelDimOptions{.dim = kDims[static_cast<std::size_t>((i * 3 + i / 4) % 4)], .allow_uneven = true});
    layers.back()->to(at::kDouble);
    weights.push_back(leaf(full_tensor(layers.back()->weight.detach())));
    biases.push_back(leaf(full_tensor(layers.back()->bias.detach())));
    CHECK(weights.back().sizes() == at::IntArrayRef({next, width}));
    width = next;
  }
  at::Tensor got = sample({3, 8}), want = got;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    got = layers[i]->forward(got);
    want = at::linear(want, weights[i], biases[i]);
    const ParallelDim dim = layers[i]->options.dim;
    CHECK(get_parallel_dim(got) == (dim && *dim != 0 ? ParallelDim(1) : std::nullopt));
    CHECK(close(full_tensor(got.detach()), want.detach()));
  }
  got.pow(2).sum().backward();
  want.pow(2).sum().backward();
  for (std::size_t i = 0; i < layers.size(); ++i) {
    CHECK(close(full_tensor(layers[i]->weight.grad()), weights[i].grad(), 1e-11));
    CHECK(close(full_tensor(layers[i]->bias.grad()), biases[i].grad(), 1e-11));
  }
}

TESSERA_RANKS_TEST_CASE("one ParallelLinear of each dim, even, uneven and empty: gradients too, and collectives",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const std::string ar = "1 all_reduce", ag = "1 all_gather";
  for (const auto& size : std::vector<std::pair<int64_t, int64_t>>{{12, 24}, {7, 5}, {1, 1}}) {
    const int64_t in = size.first, out = size.second;
    for (const ParallelDim dim : kDims) {
      CAPTURE(in);
      CAPTURE(dim.value_or(-2));
      ParallelLinear layer(in, out, mesh, ParallelDimOptions{.dim = dim, .allow_uneven = true});
      layer->to(at::kDouble);
      const at::Tensor weight = leaf(full_tensor(layer->weight.detach())),
                       bias = leaf(full_tensor(layer->bias.detach()));
      const at::Tensor whole = leaf(sample({5, 3, in})), x = leaf(whole.detach());
      const at::Tensor want = at::linear(whole, weight, bias), g = sample(want.sizes(), 2);
      CommCounter counter(mesh);
      const at::Tensor got = layer->forward(x);
      const bool by_rows = dim == ParallelDim(0), by_columns = dim.has_value() && !by_rows, several = mesh.size() > 1;
      CHECK(counted(counter) == (several && by_rows ? ar : ""));
      CHECK(placements_of(got) == Placements{by_columns ? Shard(2) : Replicate()});
      CHECK(close(full_tensor(got.detach()), want.detach()));
      want.backward(g);
      counter.reset();
      got.backward(spread(g, mesh, placements_of(got)));
      CHECK(counted(counter) == (!several || !dim ? "" : by_rows ? ag : ar));
      CHECK(close(x.grad(), whole.grad()));
      CHECK(close(full_tensor(layer->weight.grad()), weight.grad()));
      CHECK(close(full_tensor(layer->bias.grad()), bias.grad()));
    }
  }
  if (mesh.size() == 1) return;
  for (const ParallelDim dim : {ParallelDim(0), ParallelDim(1)}) {
    CHECK_THROWS_WITH_AS(ParallelLinear(5, 7, mesh, ParallelDimOptions{.dim = dim}),
                         doctest::Contains("features are not divisible by"), std::invalid_argument);
  }
}

TESSERA_RANKS_TEST_CASE("first values are torch::nn's distributions, and alike on any number of ranks", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const DeviceMesh alone(World::fake(0, 1), device().type(), Mesh({1}));
  for (const ParallelDim dim : kDims) {
    manual_seed(2, mesh.world());
    manual_seed(2, alone.world());
    const ParallelDimOptions options{.dim = dim};
    const ParallelLinear cut(36, 60, mesh, options), whole(36, 60, alone, options);
    CHECK(same(full_tensor(cut->weight.detach()), full_tensor(whole->weight.detach())));
    CHECK(same(full_tensor(cut->bias.detach()), full_tensor(whole->bias.detach())));
    CHECK(full_tensor(cut->weight.detach()).abs().max().item<float>() <= 1.0F / 6);
    CHECK(full_tensor(cut->bias.detach()).abs().max().item<float>() > 1.0F / 9);
    const ParallelDimOptions uneven{.dim = dim, .allow_uneven = true};
    const ParallelLinear pieces(7, 5, mesh, uneven), one(7, 5, alone, uneven);
    CHECK(same(full_tensor(pieces->weight.detach()), full_tensor(one->weight.detach())));
    CHECK(same(full_tensor(pieces->bias.detach()), full_tensor(one->bias.detach())));
    CHECK_FALSE(ParallelLinear(12, 12, mesh, ParallelDimOptions{.bias = false, .dim = dim})->bias.defined());
  }
  const ParallelEmbedding table = parallel_embedding_layer(ParallelEmbeddingOptions(60, 12), 0, mesh);
  CHECK(get_parallel_dim(table->weight) == ParallelDim(0));
  CHECK(table->master_weight().std().item<float>() == doctest::Approx(1).epsilon(0.1));
  CHECK(get_parallel_dim(parallel_embedding_layer(ParallelEmbeddingOptions(60, 12), -1, mesh)->weight) ==
        ParallelDim(1));
}

TESSERA_RANKS_TEST_CASE("the cross entropy loss sees by itself whether the classes are cut", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor target = at::remainder(at::arange(13, on(at::kLong)) * 5, 17);
  for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
    ParallelCrossEntropyLoss loss(ParallelCrossEntropyOptions{
        .weight = at::rsub(sample({17}, 2), 1.5), .ignore_index = 5, .reduction = reduction});
    const at::Tensor plain = leaf(sample({13, 17}) * 1000);
    const at::Tensor want = loss->forward(plain, target);
    CHECK(close(want.detach(), at::cross_entropy_loss(plain, target, loss->options.weight, reduction, 5).detach()));
    CHECK(want.sizes() == (reduction == at::Reduction::None ? target.sizes() : at::IntArrayRef()));
    want.sum().backward();
    const at::Tensor cut = leaf(spread(plain.detach(), mesh, {Shard(1)}));
    CommCounter counter(mesh);
    const at::Tensor got = loss->forward(cut, target);
    CHECK(counter.count("all_reduce") == (mesh.size() > 1 ? 2 : 0));
    CHECK(counter.total() == counter.count("all_reduce"));
    CHECK(close(got.detach(), want.detach()));
    counter.reset();
    got.sum().backward();
    CHECK(counter.total() == 0);
    CHECK(close(full_tensor(cut.grad()), plain.grad()));
  }
  // The classes are a middle dimension, as in images.
  const at::Tensor image = sample({2, 17, 3}), points = at::remainder(at::arange(6, on(at::kLong)), 17).view({2, 3});
  CHECK(close(parallel_cross_entropy(spread(image, mesh, {Shard(1)}), points), parallel_cross_entropy(image, points)));
  CHECK(close(parallel_cross_entropy(spread(image[0].t().contiguous()[0], mesh, {Shard(0)}), points[0][0]),
              parallel_cross_entropy(image[0].t().contiguous()[0], points[0][0])));
  const at::Tensor logits = at::arange(12, on(at::kDouble)).view({1, 12});
  CHECK(vocab_parallel_cross_entropy(piece_of(logits, mesh, {Shard(1)}), at::full({1}, 3, on(at::kLong)), mesh, 0.1)
            .dim() == 1);
}

TESSERA_RANKS_TEST_CASE("uneven classes, and whole logits where pieces belong", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor logits = sample({4, 5}), target = at::tensor({0L, 4L, 2L, 3L}, on(at::kLong));
  const at::Tensor want = at::cross_entropy_loss(logits, target, {}, at::Reduction::None);
  CHECK(close(vocab_parallel_cross_entropy(piece_of(logits, mesh, {Shard(1)}), target, mesh, 0, 5), want));
  run_in_process(2, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh pair = init_device_mesh(device_name(), {2}, {"tp"}, world);
    CHECK_THROWS_WITH_AS(vocab_parallel_cross_entropy(logits, target, pair, 0, 5),
                         doctest::Contains("5 of 5 classes here, of which this rank has"), std::invalid_argument);
  });
}

TEST_CASE("one_rank_errors: a bias that does not fit one rank's weight") {
  for (const std::string& text : thrown([](const DeviceMesh&mesh, bool odd) {
         parallel_linear(at::ones({3, 2}, on(at::kFloat)), at::ones({odd ? 5 : 4, 2}, on(at::kFloat)),
                         at::ones({4}, on(at::kFloat)), 0, mesh);
       })) {
    CAPTURE(text);
    CHECK(text.find("bias [4] for weight [5, 2]; by rows give one element") != std::string::npos);
  }
}

TESSERA_RANKS_TEST_CASE("rows of a linear function under autocast: the bias is cast as the product is", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({4, 12}, 1, at::kFloat), w = sample({8, 12}, 2, at::kFloat),
                   b = sample({8}, 3, at::kFloat);
  at::autocast::set_autocast_dtype(device().type(), at::kBFloat16);
  at::autocast::set_autocast_enabled(device().type(), true);
  const at::Tensor y = parallel_linear(piece_of(x, mesh, {Shard(1)}), piece_of(w, mesh, {Shard(1)}), b, 0, mesh);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device().type(), false);
  CHECK((y.scalar_type() == at::kBFloat16));
  CHECK(close(y.to(at::kFloat), at::linear(x, w, b), 2e-2));
}

TESSERA_RANKS_TEST_CASE("a table that every rank has whole", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  ParallelEmbeddingOptions options(10, 6);
  options.padding_idx = 3;
  ParallelEmbedding layer = parallel_embedding_layer(options, std::nullopt, mesh);
  CHECK(placements_of(layer->weight) == Placements{Replicate()});
  const at::Tensor ids = at::arange(10, on(at::kLong));
  CHECK(same(layer->forward(ids).detach(), layer->master_weight()));
  CHECK(same(layer->master_weight()[3], at::zeros({6}, on(at::kFloat))));
}

TESSERA_RANKS_TEST_CASE("a converted embedding keeps its values and its padding, and a layer of two names is one",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const int64_t dim : {0, 1, -1}) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(10, 6).padding_idx(3));
    table->to(device());
    {
      const c10::AutoGradMode none(false);
      table->weight.copy_(sample({10, 6}, 4));
      table->weight[3].zero_();
    }
    const at::Tensor ids = at::arange(10, on(at::kLong)), rows = table->forward(ids).detach();
    auto embedding = convert_parallel_embedding(table, dim, mesh);
    CHECK(get_parallel_dim(table->weight) == ParallelDim(dim == 0 ? 0 : 1));
    CHECK(same(full_tensor(table->weight.detach())[3], at::zeros({6}, on(at::kFloat))));
    embedding(ids).sum().backward();
    CHECK(same(full_tensor(table->weight.grad())[3], at::zeros({6}, on(at::kFloat))));
    CHECK(same(full_tensor(table->weight.grad())[4], at::ones({6}, on(at::kFloat))));
    CHECK(close(full_tensor(embedding(ids).detach()), rows));
  }
  struct Twice : torch::nn::Module {
    torch::nn::Linear linear{4, 4};
    Twice() {
      register_module("one", linear);
      register_module("other", linear);
    }
  };
  Twice twice;
  twice.to(device());
  convert_parallel_linear(twice, 1, mesh);  // a reference, and one layer of two names
  CHECK(get_parallel_dim(twice.linear->weight) == ParallelDim(0));
  const auto shared = std::make_shared<Twice>();
  shared->to(device());
  convert_parallel_linear(shared, 0, mesh);
  CHECK(get_parallel_dim(shared->linear->weight) == ParallelDim(1));
  CHECK_THROWS_WITH_AS(convert_parallel_linear(std::shared_ptr<Twice>(), 0, mesh), doctest::Contains("a null pointer"),
                       std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("attributes are read from placements, and cannot disagree with them", {1, 2, 4}) {
  const DeviceMesh mesh = line();
  const auto attributes = [&](const Placement& p) {
    return tensor_parallel_attributes(spread(sample({16, 8}), mesh, {p}));
  };
  CHECK(attributes(Replicate()) == TensorParallelAttributes());
  CHECK(tensor_parallel_attributes(at::ones({2}, on(at::kFloat))) == TensorParallelAttributes());
  CHECK(attributes(Shard(1)) == TensorParallelAttributes{.is_parallel = true, .partition_dim = 1});
  const at::Tensor strided = spread(sample({16, 8}), mesh, {BlockCyclic(0, 8 / mesh.size())});
  const int64_t stride = 2;  // also on one rank
  CHECK(tensor_parallel_attributes(strided).partition_stride == stride);
  set_tensor_parallel_attributes(strided, true, 0, stride);
  copy_tensor_parallel_attributes(strided.detach(), strided);
  set_defaults_if_not_set_tensor_parallel_attributes(strided);  // does nothing: the placements give the attributes
  CHECK(tensor_parallel_attributes(strided).partition_stride == stride);
  CHECK_THROWS_WITH_AS(
      set_tensor_parallel_attributes(strided, true, 1),
      doctest::Contains("was to be parallel along dimension 1 with stride 1; redistribute makes it so"),
      std::invalid_argument);
  CHECK_THROWS_WITH_AS(copy_tensor_parallel_attributes(strided, at::ones({2}, on(at::kFloat))),
                       doctest::Contains("copy_tensor_parallel_attributes: the tensor is parallel along dimension 0 "
                                         "with stride 2, and was to be not parallel"),
                       std::invalid_argument);
  const bool first = mesh.local_rank(0) == 0;
  CHECK(is_not_tensor_parallel_duplicate(strided, mesh));
  CHECK(is_not_tensor_parallel_duplicate(spread(sample({4}), mesh, {Replicate()}), mesh) == first);
  CHECK(is_not_tensor_parallel_duplicate(at::ones({2}, on(at::kFloat)), mesh) == first);
  CHECK_THROWS_WITH_AS(is_not_tensor_parallel_duplicate(spread(sample({4}), mesh, {Partial()}), mesh),
                       doctest::Contains("pending reduction"), std::invalid_argument);
  const at::Tensor set = at::ones({2}, on(at::kFloat));
  set_tensor_parallel_attributes(set, true, 0);
  CHECK(is_not_tensor_parallel_duplicate(set, mesh));
  if (mesh.size() != 4) return;
  // On two dimensions the parameter counts once per replica, over whose ranks the sum runs.
  const DeviceMesh plane = init_device_mesh(device_name(), {2, 2}, {"dp", "tp"}, world());
  const at::Tensor whole = spread(sample({4}), plane, {Replicate(), Replicate()});
  const at::Tensor cut = spread(sample({4}), plane, {Replicate(), Shard(0)});
  CHECK(is_not_tensor_parallel_duplicate(whole, plane["tp"]) == (plane.local_rank("tp") == 0));
  CHECK(is_not_tensor_parallel_duplicate(cut, plane["tp"]));
  CHECK(is_not_tensor_parallel_duplicate(cut, plane["dp"]) == (plane.local_rank("dp") == 0));
  CHECK_THROWS_WITH_AS(is_not_tensor_parallel_duplicate(whole, plane),
                       doctest::Contains("has 2 dimensions; give one of them"), std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("a bias is added within the product where columns are cut, and after the sum where rows are",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({2, 3, 12}, 1), w = sample({10, 12}, 2), b = sample({10}, 3);
  struct Row {
    Placement x, w, b;
    bool within;
  };
  for (const Row& row : {Row{Replicate(), Shard(0), Shard(0), true}, Row{Shard(1), Replicate(), Replicate(), true},
                         Row{Replicate(), Replicate(), Replicate(), true}, Row{Shard(2), Shard(1), Replicate(), false},
                         Row{Shard(1), Shard(0), Shard(0), false}, Row{Replicate(), Shard(0), Replicate(), false}}) {
    CAPTURE(to_string(row.w));
    CAPTURE(to_string(row.x));
    std::vector<at::Tensor> plain, cut;
    const auto add = [&](const at::Tensor& values, const Placement& placement) {
      plain.push_back(values.clone().requires_grad_(true));
      cut.push_back(distribute_tensor(values, mesh, {placement}).detach().requires_grad_(true));
    };
    add(x, row.x);
    add(w, row.w);
    add(b, row.b);
    const std::size_t before = mesh.world().recorder().records().size();
    const at::Tensor y = at::linear(cut[0], cut[1], cut[2]);
    int within = 0, after = 0;
    const std::vector<Record> records = mesh.world().recorder().records();
    for (std::size_t i = before; i < records.size(); ++i) {
      within += records[i].name == "tessera::dense_bias" ? 1 : 0;
      after += records[i].name.starts_with("aten::add") ? 1 : 0;
    }
    CHECK(within == (row.within ? 1 : 0));
    CHECK(after == (row.within ? 0 : 1));
    const at::Tensor want = at::linear(plain[0], plain[1], plain[2]);
    CHECK(close(full_tensor(y).detach(), want.detach()));
    // Second derivatives too.
    const auto gradients = [](const at::Tensor& result, const std::vector<at::Tensor>& inputs) {
      const auto first = torch::autograd::grad({result.square().sum()}, inputs, {}, true, /*create_graph=*/true);
      return torch::autograd::grad({first[0].square().sum() + first[1].square().sum() + first[2].square().sum()},
                                   inputs);
    };
    const auto got = gradients(y, cut), wanted = gradients(want, plain);
    for (std::size_t i = 0; i < wanted.size(); ++i) CHECK(close(full_tensor(got[i]), wanted[i]));
  }
}

TESSERA_RANKS_TEST_CASE("where a linear function's bias alone has a gradient, nothing is kept for it", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor b = distribute_tensor(sample({10}, 3), mesh, {Shard(0)}).detach().requires_grad_(true);
  const at::Tensor y = at::linear(distribute_tensor(sample({2, 3, 12}, 1), mesh, {Replicate()}),
                                  distribute_tensor(sample({10, 12}, 2), mesh, {Shard(0)}), b);
  for (int i = 1; i <= 2; ++i) {
    y.backward(at::ones_like(y));
    CHECK(close(full_tensor(b.grad()), at::full({10}, 6.0 * i, on(at::kDouble))));
  }
}

TEST_CASE("attributes of a plain tensor are what was set on it") {
  const TensorParallelAttributes columns{.is_parallel = true, .partition_dim = 1, .partition_stride = 2};
  const at::Tensor t = at::ones({4, 6});
  set_tensor_parallel_attributes(t, true, 1, 2);
  CHECK(tensor_parallel_attributes(t) == columns);
  set_tensor_parallel_attributes(t, true, 1, 2);  // the same again
  set_defaults_if_not_set_tensor_parallel_attributes(t);
  CHECK(tensor_parallel_attributes(t) == columns);
  CHECK_THROWS_WITH_AS(set_tensor_parallel_attributes(t, true, 0),
                       doctest::Contains("was set to be parallel along dimension 1 with stride 2 before"),
                       std::invalid_argument);

  const at::Tensor other = at::ones({4, 6}), unset = at::ones({4, 6});
  set_defaults_if_not_set_tensor_parallel_attributes(other);
  CHECK(tensor_parallel_attributes(other) == TensorParallelAttributes());
  CHECK_THROWS_WITH_AS(set_tensor_parallel_attributes(other, true, 0),  // the defaults are set, too
                       doctest::Contains("was set to be not parallel before, and now to be parallel along dimension 0"),
                       std::invalid_argument);
  copy_tensor_parallel_attributes(other, unset);
  CHECK(tensor_parallel_attributes(other) == TensorParallelAttributes());
  copy_tensor_parallel_attributes(other, t);
  CHECK(tensor_parallel_attributes(other) == columns);
  copy_tensor_parallel_attributes(t, unset);
  CHECK(tensor_parallel_attributes(t) == columns);
  CHECK(tensor_parallel_attributes(unset) == TensorParallelAttributes());
  set_tensor_parallel_attributes(unset, false, -1);
  CHECK(tensor_parallel_attributes(unset) == TensorParallelAttributes());

  // The attributes stay with a parameter whose module is cast; tensors made of it, or later at its address, have none.
  torch::nn::Linear linear(6, 4);
  set_tensor_parallel_attributes(linear->weight, true, 1, 2);
  linear->to(at::kDouble);
  CHECK((linear->weight.scalar_type() == at::kDouble));
  CHECK(tensor_parallel_attributes(linear->weight) == columns);
  CHECK(tensor_parallel_attributes(linear->weight.detach()) == TensorParallelAttributes());
  CHECK(tensor_parallel_attributes(linear->weight.clone()) == TensorParallelAttributes());
  linear->forward(at::ones({2, 6}, at::kDouble)).sum().backward();
  CHECK(tensor_parallel_attributes(linear->weight.grad()) == TensorParallelAttributes());
  for (int i = 0; i < 500; ++i) {
    const at::Tensor brief = at::ones({4, 6});
    REQUIRE(tensor_parallel_attributes(brief) == TensorParallelAttributes());
    set_tensor_parallel_attributes(brief, true, 1, 2);
  }
  CHECK(tensor_parallel_attributes(linear->weight) == columns);

  CHECK_THROWS_WITH_AS(set_tensor_parallel_attributes(at::ones({2}), true, 1),
                       doctest::Contains("dim 1 of a tensor of 1 dimensions"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(set_tensor_parallel_attributes(at::ones({2}), true, -1), doctest::Contains("dim -1"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(set_tensor_parallel_attributes(at::ones({2}), true, 0, 0), doctest::Contains("stride 0"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(copy_tensor_parallel_attributes(at::ones({2}), t), doctest::Contains("dim 1"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(set_tensor_parallel_attributes(at::Tensor(), true, 0), doctest::Contains("undefined"),
                       std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE(
    "attributes that a DTensor's placements say are copied to a plain tensor, and go when it is cut", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor plain = at::ones({4, 6}, on(at::kFloat));
  copy_tensor_parallel_attributes(plain, spread(sample({4, 6}), mesh, {Shard(1)}));
  CHECK(tensor_parallel_attributes(plain) == TensorParallelAttributes{.is_parallel = true, .partition_dim = 1});
  distribute_in_place(plain, mesh, {Shard(0)});
  CHECK(tensor_parallel_attributes(plain) == TensorParallelAttributes{.is_parallel = true, .partition_dim = 0});
}
