// Assigns parameters of named layers, as models do that tie a table and a head, and stacks the layers in one
// Sequential.

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/sgd.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/parallel_dim.h"
#include "tessera/layers/parallel_embedding.h"
#include "tessera/layers/parallel_linear.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/coming_from/one_process.h"
#include "tessera/tests/dtensor/thrown.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/dtensor/whole_value.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

void stir(const torch::nn::Module& module) {
  const c10::AutoGradMode none(false);
  for (const at::Tensor& each : module.parameters()) at::Tensor(each).uniform_(-1, 1);
}

}  // namespace

TESSERA_RANKS_TEST_CASE("a stack of named layers in one Sequential equals one process, and so does its clone",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  ParallelEmbeddingOptions table(10, 6);
  table.allow_uneven = true;
  table.config = in_double();
  ColumnParallelOptions up(6, 9);
  up.allow_uneven = true;
  up.config = in_double();
  RowParallelOptions down(9, 7);
  down.allow_uneven = true;
  down.input_is_parallel = true;
  down.config = in_double();
  ParallelLinear head(7, 5, mesh, ParallelDimOptions{.dim = 1, .allow_uneven = true});
  head->to(at::kDouble);
  torch::nn::Sequential model(ParallelEmbedding(table, mesh), ColumnParallelLinear(up, mesh), torch::nn::Tanh(),
                              RowParallelLinear(down, mesh), RegisterParallelDim(std::nullopt, mesh), head);
  stir(*model);
  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  const at::Tensor ids = at::remainder(at::arange(8) * 3, 10), g = sample({8, 5}, 9);
  for (torch::nn::SequentialImpl* const each : {model.get(), copy.get()}) {
    std::vector<at::Tensor> p;
    for (const at::Tensor& parameter : each->parameters()) p.push_back(leaf(full_tensor(parameter.detach())));
    REQUIRE(p.size() == 7);
    const at::Tensor hidden = at::tanh(at::linear(at::embedding(p[0], ids), p[1], p[2]));
    const at::Tensor want = at::linear(at::linear(hidden, p[3], p[4]), p[5], p[6]);
    const at::Tensor got = each->forward(ids);
    CHECK(close(full_tensor(got.detach()), want.detach()));
    want.backward(g);
    got.backward(spread(g, mesh, placements_of(got)));
    std::size_t i = 0;
    for (const at::Tensor& parameter : each->parameters()) CHECK(close(full_tensor(parameter.grad()), p[i++].grad()));
  }
}

namespace {

// Checks a `weight` [10, 6] in two layers, a table of ids and a head of 10 features, against one process. `head` is
// given x [*, 6].
template <class Head>
void check_tied(Head& head, const at::Tensor& weight, const DeviceMesh& mesh, bool with_bias) {
  head.weight = weight;
  const at::Tensor x = sample({4, 6}), g = sample({4, 10}, 3);
  const at::Tensor mine = leaf(x), whole = leaf(x), dense = leaf(full_tensor(weight.detach()));
  const at::Tensor bias = with_bias ? full_tensor(head.bias.detach()) : at::Tensor();
  const at::Tensor want = at::linear(whole, dense, with_bias ? std::make_optional(bias) : std::nullopt);
  want.backward(g);
  weight.mutable_grad() = at::Tensor();
  const auto copy = std::dynamic_pointer_cast<Head>(head.clone());
  const at::Tensor got = head.forward(mine);
  CHECK(close(whole_value(got), want.detach()));
  got.backward(is_dtensor(got) ? spread(g, mesh, placements_of(got)) : g);
  CHECK(close(mine.grad(), whole.grad()));
  CHECK(close(full_tensor(weight.grad()), dense.grad()));
  // A copy computes what the layer computes, with values of its own.
  const at::Tensor copied = copy->forward(x);
  CHECK(close(whole_value(copied), want.detach()));
  CHECK_FALSE(copy->weight.is_same(weight));
  CHECK(copy->named_parameters()["weight"].is_same(copy->weight));
  copied.pow(2).sum().backward();
  CHECK(copy->weight.grad().defined());
  CHECK(close(full_tensor(weight.grad()), dense.grad()));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("a weight assigned to a layer is the one that it uses, however it lies", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const Placement& lies : {Shard(0), Shard(1), Replicate()}) {
    CAPTURE(to_string(lies));
    const at::Tensor weight = leaf(spread(sample({10, 6}, 7), mesh, {lies}));
    for (const ParallelDim dim : std::vector<ParallelDim>{std::nullopt, 0, 1, -1}) {
      CAPTURE(dim.value_or(-2));
      ParallelLinear head(6, 10, mesh, ParallelDimOptions{.dim = dim, .allow_uneven = true});
      head->to(at::kDouble);
      check_tied(*head, weight, mesh, true);
      ParallelEmbeddingOptions options(10, 6);
      options.allow_uneven = true;
      options.config = in_double();
      ParallelEmbedding table = parallel_embedding_layer(options, dim, mesh);
      table->weight = weight;
      const at::Tensor ids = at::remainder(at::arange(12) * 7, 10);
      CHECK(close(table->forward(ids).detach(), at::embedding(full_tensor(weight.detach()), ids)));
      const auto copy = std::dynamic_pointer_cast<ParallelEmbeddingImpl>(table->clone());
      CHECK(close(copy->forward(ids).detach(), at::embedding(full_tensor(weight.detach()), ids)));
    }
    for (const bool skip : {false, true}) {
      ColumnParallelOptions columns(6, 10);
      columns.gather_output = true;
      columns.allow_uneven = true;
      columns.config = in_double();
      columns.skip_weight_param_allocation = skip;
      ColumnParallelLinear column(columns, mesh);
      column->weight = weight;
      const auto copy = std::dynamic_pointer_cast<ColumnParallelLinearImpl>(column->clone());
      CHECK(copy->named_parameters().contains("weight") != skip);
      CHECK_FALSE(copy->weight.is_same(weight));
      CHECK(same(copy->forward(sample({4, 6})).detach(), column->forward(sample({4, 6})).detach()));
      if (!skip) check_tied(*column, weight, mesh, true);
    }
    RowParallelOptions rows(6, 10);
    rows.allow_uneven = true;
    rows.bias = false;
    rows.config = in_double();
    check_tied(*RowParallelLinear(rows, mesh), weight, mesh, false);
  }
}

namespace {

// Trains a table of each dim with a head of `of_head` that has its weight.
void check_trained(ParallelDim of_head, const DeviceMesh& mesh) {
  const at::Tensor ids = at::remainder(at::arange(6) * 7, 10), g = sample({6, 10}, 4);
  for (const ParallelDim of_table : std::vector<ParallelDim>{std::nullopt, 0, 1}) {
    ParallelEmbeddingOptions options(10, 6);
    options.allow_uneven = true;
    options.config = in_double();
    ParallelEmbedding table = parallel_embedding_layer(options, of_table, mesh);
    ParallelLinear head(6, 10, mesh, ParallelDimOptions{.bias = false, .dim = of_head, .allow_uneven = true});
    head->weight = table->weight;
    const at::Tensor dense = leaf(table->master_weight());
    torch::optim::SGD here({table->weight}, 0.25), there({dense}, 0.25);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor got = head->forward(table->forward(ids)), want = at::linear(at::embedding(dense, ids), dense);
      CHECK(close(full_tensor(got.detach()), want.detach()));
      here.zero_grad();
      there.zero_grad();
      got.backward(spread(g, mesh, placements_of(got)));
      want.backward(g);
      here.step();
      there.step();
      CHECK(close(full_tensor(table->weight.detach()), dense.detach()));
    }
  }
}

}  // namespace

TESSERA_RANKS_TEST_CASE("head->weight = table->weight: they train as in one process", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  SUBCASE("dim = None") { check_trained(std::nullopt, mesh); }
  SUBCASE("dim = 0") { check_trained(0, mesh); }
  SUBCASE("dim = 1") { check_trained(1, mesh); }
}

TESSERA_RANKS_TEST_CASE("assigned biases and pieces, and tensors that do not fit", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({4, 6}), w = sample({10, 6}, 2), b = sample({10}, 3), want = at::linear(x, w, b);
  for (const ParallelDim dim : std::vector<ParallelDim>{std::nullopt, 0, 1}) {
    ParallelLinear layer(6, 10, mesh, ParallelDimOptions{.dim = dim, .allow_uneven = true});
    const Placement cut = dim ? Shard(*dim == 0 ? 1 : 0) : Replicate(),
                    of_bias = dim == ParallelDim(1) ? Shard(0) : Replicate();
    layer->weight = piece_of(w, mesh, {cut});
    for (const Placement& lies : {Shard(0), Replicate()}) {
      layer->bias = spread(b, mesh, {lies});
      CHECK(close(full_tensor(layer->forward(x)), want));
    }
    layer->bias = piece_of(b, mesh, {of_bias});
    CHECK(close(full_tensor(layer->forward(x)), want));
    layer->weight = spread(sample({9, 6}), mesh, {Replicate()});
    CHECK_THROWS_WITH_AS(layer->forward(x), doctest::Contains("ParallelLinear: supplied weight is Double [9, 6]"),
                         std::invalid_argument);
    const DeviceMesh plane = mesh_over({1, mesh.size()});
    layer->weight = spread(w, plane, {Replicate(), Replicate()});
    CHECK_THROWS_WITH_AS(layer->forward(x), doctest::Contains("as expected"), std::invalid_argument);
  }
  RowParallelOptions rows(6, 10);
  rows.allow_uneven = true;
  rows.config = in_double();
  for (const bool skip : {false, true}) {
    rows.skip_bias_add = skip;
    RowParallelLinear row(rows, mesh);
    row->weight = piece_of(w, mesh, {Shard(1)});
    row->bias = spread(b, mesh, {Shard(0)});
    for (const bool global : {false, true}) {
      const LinearOutput out = row->forward_with_bias(global ? spread(x, mesh, {Shard(0)}) : x);
      CHECK(close(whole_value(skip ? out.output + out.bias : out.output), want));
    }
  }
  // The gradient of a plain bias is the sum over the ranks' parts of the sequence, as that of the layer's own.
  rows.skip_bias_add = false;
  rows.input_is_parallel = true;
  rows.config.sequence_parallel = true;
  RowParallelLinear in_sequence(rows, mesh), own(rows, mesh);
  in_sequence->bias = b.clone().requires_grad_();
  const at::Tensor weights = sample({12, 10}, 4);
  for (RowParallelLinear each : {in_sequence, own}) {
    const at::Tensor out = each->forward(piece_of(sample({12, 6}), mesh, {Shard(1)}));
    (out * piece_of(weights, mesh, {Shard(0)})).sum().backward();
  }
  CHECK(close(in_sequence->bias.grad(), weights.sum(0)));
  CHECK(close(full_tensor(own->bias.grad()), weights.sum(0)));
  for (const bool gather : {false, true}) {
    ColumnParallelOptions columns(6, 10);
    columns.gather_output = gather;
    columns.allow_uneven = true;
    columns.skip_bias_add = true;
    columns.config = in_double();
    ColumnParallelLinear column(columns, mesh);
    column->weight = spread(w, mesh, {Replicate()});
    column->bias = spread(b, mesh, {Replicate()});
    for (const bool global : {false, true}) {
      const LinearOutput out = column->forward_with_bias(global ? spread(x, mesh, {Shard(0)}) : x);
      const at::Tensor sum = out.output + out.bias;
      CHECK(close(global ? full_tensor(sum) : sum, global || gather ? want : piece_of(want, mesh, {Shard(1)})));
    }
  }
  if (mesh.size() == 1) return;
  ParallelEmbeddingOptions options(10, 6);
  options.allow_uneven = true;
  options.max_norm = 1;
  options.config = in_double();
  ParallelEmbedding table(options, mesh);
  table->weight = spread(w, mesh, {Shard(0)});
  CHECK_THROWS_WITH_AS(table->forward(at::arange(4)), doctest::Contains("max_norm writes the table"),
                       std::invalid_argument);
}

TEST_CASE("one_rank_errors: a plain weight or input of other sizes fails the job") {
  const auto fails = [](const std::string& part, const std::function<void(const DeviceMesh&, bool)>& body) {
    for (const std::string& text : thrown(body)) {
      CAPTURE(text);
      CHECK(text.find(part) != std::string::npos);
    }
  };
  fails("supplied weight's shape is [5, 3], not [4, 3] as expected", [](const DeviceMesh& mesh, bool odd) {
    ParallelLinear layer(6, 4, mesh, ParallelDimOptions{.dim = 0});
    layer->weight = at::ones({odd ? 5 : 4, 3}, on(at::kFloat));
    full_tensor(layer->forward(at::ones({2, 6}, on(at::kFloat))));
  });
  fails("input [2, 4]; it has 6 features in its last dimension, or this rank's part of them", [](const DeviceMesh& mesh,
                                                                                                 bool odd) {
    full_tensor(
        ParallelLinear(6, 4, mesh, ParallelDimOptions{.dim = 0})->forward(at::ones({2, odd ? 4 : 6}, on(at::kFloat))));
  });
  fails("supplied weight's shape is [3, 6], not [2, 6] as expected", [](const DeviceMesh& mesh, bool odd) {
    ParallelEmbeddingOptions options(4, 6);
    options.cut = EmbeddingCut::kVocabulary;
    ParallelEmbedding layer(options, mesh);
    layer->weight = at::ones({odd ? 3 : 2, 6}, on(at::kFloat));
    layer->forward(at::arange(4, on(at::kLong)));
  });
}

TESSERA_RANKS_TEST_CASE("ParallelLinear by rows takes this rank's features as a plain input, or the whole",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const auto& size : std::vector<std::pair<int64_t, int64_t>>{{12, 24}, {7, 5}, {2, 3}}) {
    const int64_t in = size.first, out = size.second;
    CAPTURE(in);
    ParallelLinear layer(in, out, mesh, ParallelDimOptions{.dim = 0, .allow_uneven = true});
    layer->to(at::kDouble);
    const at::Tensor weight = leaf(full_tensor(layer->weight.detach())), bias = leaf(full_tensor(layer->bias.detach()));
    const at::Tensor whole = leaf(sample({5, 3, in})), g = sample({5, 3, out}, 2),
                     want = at::linear(whole, weight, bias);
    want.backward(g);
    const at::Tensor piece = leaf(piece_of(whole.detach(), mesh, {Shard(2)}));
    CommCounter counter(mesh);
    const at::Tensor got = layer->forward(piece);
    CHECK(counter.total() == (mesh.size() > 1 ? 1 : 0));
    CHECK(placements_of(got) == Placements{Replicate()});
    CHECK(close(full_tensor(got.detach()), want.detach()));
    counter.reset();
    got.backward(spread(g, mesh, {Replicate()}));
    CHECK(counter.total() == 0);
    CHECK(close(piece.grad(), piece_of(whole.grad(), mesh, {Shard(2)})));
    CHECK(close(full_tensor(layer->weight.grad()), weight.grad()));
    CHECK(close(full_tensor(layer->bias.grad()), bias.grad()));
  }
  // TorchShard stacks two layers so: the second, by rows, takes the output of the first, by columns, marked or plain.
  ParallelLinear up(6, 9, mesh, ParallelDimOptions{.dim = -1, .allow_uneven = true});
  ParallelLinear down(9, 4, mesh, ParallelDimOptions{.dim = 0, .allow_uneven = true});
  const at::Tensor x = sample({5, 6}, 1, at::kFloat), hidden = up->forward(x);
  const at::Tensor of_piece = down->forward(to_local(hidden)).detach(), of_whole = down->forward(hidden).detach();
  CHECK(placements_of(of_piece) == placements_of(of_whole));
  CHECK(same(to_local(of_piece), to_local(of_whole)));
  CHECK(same(full_tensor(of_piece), full_tensor(of_whole)));
}

namespace {

void check_begun(ParallelDim dim, const DeviceMesh& mesh) {
  ParallelEmbeddingOptions options(12, 6);
  options.padding_idx = 3;
  options.init_method = init_method(InitType::kOnes);
  at::Tensor want = at::ones({12, 6});
  want[3].zero_();
  CHECK(same(parallel_embedding_layer(options, dim, mesh)->master_weight(), want));
  options.init_method = nullptr;
  const at::Tensor normal = parallel_embedding_layer(options, dim, mesh)->master_weight();
  CHECK(normal.abs().max().item<float>() > 1.2F);  // xavier's deviation would be a third of that
}

}  // namespace

TESSERA_RANKS_TEST_CASE("parallel_embedding_layer takes the caller's init_method, and its own where there is none",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  SUBCASE("dim = None") { check_begun(std::nullopt, mesh); }
  SUBCASE("dim = 0") { check_begun(0, mesh); }
  SUBCASE("dim = 1") { check_begun(1, mesh); }
}

TESSERA_RANKS_TEST_CASE("a clone has no main_grad, without which it does not train", {1, 2}) {
  const DeviceMesh mesh = line();
  ColumnParallelOptions columns(4, 8);
  columns.config = in_double();
  columns.config.gradient_accumulation_fusion = true;
  ColumnParallelLinear layer(columns, mesh);
  layer->main_grad = at::zeros_like(to_local(layer->weight.detach()));
  const auto copy = std::dynamic_pointer_cast<ColumnParallelLinearImpl>(layer->clone());
  CHECK_FALSE(copy->main_grad.defined());
  copy->main_grad = at::zeros_like(layer->main_grad);
  copy->forward(sample({3, 4})).sum().backward();
  CHECK(layer->main_grad.abs().sum().item<double>() == 0);
  CHECK(copy->main_grad.abs().sum().item<double>() > 0);
}
