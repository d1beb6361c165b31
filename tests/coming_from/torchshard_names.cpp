// Tests the names of document 003, TorchShard's, with each of their parameters, against one process.

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <doctest/doctest.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/parallel_dim.h"
#include "tessera/layers/parallel_embedding.h"
#include "tessera/layers/parallelism.h"
#include "tessera/tests/coming_from/one_process.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/refused.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

const std::vector<ParallelDim> kDims = {std::nullopt, 0, 1, -1};

// Compares a layer, forward and backward, with at::linear of its parameters; `of_output` is the dimension that its
// output has to be sharded along.
void check_linear(int64_t in, int64_t out, const ParallelDimOptions& options, ParallelDim of_output,
                  const DeviceMesh& mesh) {
  ParallelLinear layer(in, out, mesh, options);
  layer->to(at::kDouble);
  CHECK(layer->weight.sizes() == at::IntArrayRef({out, in}));
  CHECK(layer->bias.defined() == options.bias);
  const at::Tensor x = leaf(sample({5, in})), mine = leaf(x), w = leaf(full_tensor(layer->weight.detach()));
  const at::Tensor b = options.bias ? leaf(full_tensor(layer->bias.detach())) : at::Tensor();
  const at::Tensor want = at::linear(x, w, options.bias ? std::make_optional(b) : std::nullopt);
  const at::Tensor got = layer->forward(mine), g = sample(want.sizes(), 2);
  CHECK(get_parallel_dim(got) == of_output);
  CHECK(close(full_tensor(got.detach()), want.detach()));
  want.backward(g);
  got.backward(spread(g, mesh, placements_of(got)));
  CHECK(close(mine.grad(), x.grad()));
  CHECK(close(full_tensor(layer->weight.grad()), w.grad()));
  if (options.bias) CHECK(close(full_tensor(layer->bias.grad()), b.grad()));
}

// Checks that converted modules keep their values and requires_grad, and compute what they did.
void check_converted(ParallelDim dim, const DeviceMesh& mesh) {
  torch::nn::Sequential model(torch::nn::Linear(10, 16), torch::nn::Linear(16, 12));
  model->to(at::kDouble);
  at::Tensor(model[0]->as<torch::nn::Linear>()->bias).requires_grad_(false);
  for (const at::Tensor& each : model->parameters()) {
    const c10::AutoGradMode none(false);
    at::Tensor(each).copy_(sample(each.sizes(), each.numel()));
  }
  const at::Tensor whole = leaf(sample({4, 10})), mine = leaf(whole), want = model->forward(whole);
  const at::Tensor weight = model[0]->as<torch::nn::Linear>()->weight.detach().clone();
  want.pow(2).sum().backward();
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& each : model->parameters()) {
    gradients.push_back(each.grad().defined() ? each.grad().clone() : at::Tensor());
  }
  model->zero_grad();
  auto converted = convert_parallel_linear(model, dim, mesh);
  const at::Tensor& now = model[0]->as<torch::nn::Linear>()->weight;
  CHECK(get_parallel_dim(now) == (!dim ? std::nullopt : ParallelDim(*dim == 0 ? 1 : 0)));
  CHECK(same(full_tensor(now.detach()), weight));
  CHECK_FALSE(model[0]->as<torch::nn::Linear>()->bias.requires_grad());
  const at::Tensor got = converted(mine);
  CHECK(close(full_tensor(got.detach()), want.detach()));
  got.pow(2).sum().backward();
  CHECK(close(mine.grad(), whole.grad()));
  const std::vector<at::Tensor> parameters = model->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    CHECK(parameters[i].grad().defined() == gradients[i].defined());
    if (gradients[i].defined()) CHECK(close(full_tensor(parameters[i].grad()), gradients[i]));
  }
}

}  // namespace

TESSERA_RANKS_TEST_CASE("ParallelLinear", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const auto of_output = [](ParallelDim dim) { return dim && *dim != 0 ? ParallelDim(1) : std::nullopt; };
  SUBCASE("in_features") {
    for (const ParallelDim dim : kDims) check_linear(24, 12, {.dim = dim}, of_output(dim), mesh);
  }
  SUBCASE("out_features") {
    for (const ParallelDim dim : kDims) check_linear(12, 36, {.dim = dim}, of_output(dim), mesh);
  }
  SUBCASE("bias") {
    for (const ParallelDim dim : kDims) check_linear(12, 24, {.bias = false, .dim = dim}, of_output(dim), mesh);
  }
  SUBCASE("dim = None") { check_linear(7, 5, {.dim = std::nullopt}, std::nullopt, mesh); }
  SUBCASE("dim = 1 or -1") {
    for (const int64_t dim : {1, -1}) {
      check_linear(7, 12, {.dim = dim}, 1, mesh);
      CHECK(get_parallel_dim(ParallelLinear(7, 12, mesh, ParallelDimOptions{.dim = dim})->weight) == ParallelDim(0));
    }
  }
  SUBCASE("dim = 0") {
    check_linear(12, 5, {.dim = 0}, std::nullopt, mesh);
    CHECK(get_parallel_dim(ParallelLinear(12, 5, mesh, ParallelDimOptions{.dim = 0})->weight) == ParallelDim(1));
    CHECK_THROWS_WITH_AS(ParallelLinear(12, 12, mesh, ParallelDimOptions{.dim = 2}),
                         doctest::Contains("it is 0, 1, -1 or none"), std::invalid_argument);
  }
  SUBCASE("weight") {  // an assigned one of any layout is used
    const at::Tensor x = sample({4, 12}), w = sample({24, 12}, 7);
    for (const ParallelDim dim : kDims) {
      ParallelLinear layer(12, 24, mesh, ParallelDimOptions{.bias = false, .dim = dim});
      for (const Placement& lies : {Shard(0), Shard(1), Replicate()}) {
        layer->weight = spread(w, mesh, {lies});
        CHECK(close(full_tensor(layer->forward(x)), at::linear(x, w)));
      }
    }
  }
  SUBCASE("convert_parallel_linear(module, dim)") {
    for (const ParallelDim dim : kDims) check_converted(dim, mesh);
    torch::nn::Linear other(4, 4);
    CHECK_THROWS_WITH_AS(convert_parallel_linear(other, 2, mesh), doctest::Contains("dim 2; it is 0, 1, -1 or none"),
                         std::invalid_argument);
  }
}

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// An embedding of a table with zeros among its numbers, by whole ids.
struct Lookup {
  at::Tensor ids = at::remainder(at::arange(40) * 7, 24).view({8, 5});
  at::Tensor table = sample({24, 12}).masked_fill(at::remainder(at::arange(24 * 12), 5).le(1).view({24, 12}), 0);
  ShardedEmbeddingOptions options{.num_embeddings = 24};
};

using Check = std::function<void(const Lookup&, ParallelDim)>;
void for_all_dims(const Lookup& lookup, const Check& check) {
  for (const ParallelDim dim : kDims) check(lookup, dim);
}

// Computes LibTorch's embedding of the whole table, whose rows max_norm writes.
at::Tensor dense(const Lookup& lookup, const at::Tensor& table) {
  const ShardedEmbeddingOptions& o = lookup.options;
  if (o.max_norm) {
    at::Tensor rows = table.detach();
    at::embedding_renorm_(rows, lookup.ids.reshape({-1}), *o.max_norm, o.norm_type);
  }
  const int64_t count = table.size(0), padding = o.padding_idx ? (*o.padding_idx + count) % count : -1;
  return at::embedding(table, lookup.ids, padding, o.scale_grad_by_freq, o.sparse);
}

// Compares a layer of these options whose first values are the table with LibTorch.
void check_layer(const Lookup& lookup, ParallelDim dim, const DeviceMesh& mesh) {
  CAPTURE(dim.value_or(-2));
  const ShardedEmbeddingOptions& o = lookup.options;
  ParallelEmbeddingOptions options(lookup.table.size(0), lookup.table.size(1));
  options.padding_idx = o.padding_idx;
  options.max_norm = o.max_norm;
  options.norm_type = o.norm_type;
  options.scale_grad_by_freq = o.scale_grad_by_freq;
  options.sparse = o.sparse;
  options.given_weight = lookup.table;
  options.config.params_dtype = at::kDouble;
  ParallelEmbedding layer = parallel_embedding_layer(options, dim, mesh);
  CHECK(layer->weight.sizes() == lookup.table.sizes());
  CHECK(get_parallel_dim(layer->weight) == (dim ? ParallelDim(*dim == 0 ? 0 : 1) : std::nullopt));
  const at::Tensor table = leaf(lookup.table), want = dense(lookup, table), got = layer->forward(lookup.ids);
  CHECK(close(got.detach(), want.detach()));
  CHECK(close(layer->master_weight(), table.detach()));
  const at::Tensor g = sample(want.sizes(), 2);
  want.backward(g);
  got.backward(g);
  CHECK_FALSE(layer->weight.grad().is_sparse());  // a DTensor's gradient is dense
  CHECK(close(full_tensor(layer->weight.grad()), table.grad().to_dense()));
}

// Checks that a table has these sizes where no weight is given, and that a given one of other sizes is refused.
void check_sizes(int64_t rows, int64_t width, const DeviceMesh& mesh) {
  for (const ParallelDim dim : kDims) {
    CAPTURE(dim.value_or(-2));
    ParallelEmbeddingOptions options(rows, width);
    ParallelEmbedding layer = parallel_embedding_layer(options, dim, mesh);
    CHECK(layer->weight.sizes() == at::IntArrayRef({rows, width}));
    CHECK(same(layer->forward(at::arange(rows)).detach(), layer->master_weight()));
    options.given_weight = sample({24, 12}, 1, at::kFloat);
    check_refused([&] { parallel_embedding_layer(options, dim, mesh); }, "given_weight is [24, 12]");
  }
}

// Compares the function of a plain piece with LibTorch.
void check_function(const Lookup& lookup, ParallelDim dim, const DeviceMesh& mesh) {
  CAPTURE(dim.value_or(-2));
  const Placements cut = {dim ? Shard(*dim == 0 ? 0 : 1) : Replicate()};
  const at::Tensor table = leaf(lookup.table), piece = leaf(piece_of(lookup.table, mesh, cut));
  const at::Tensor want = dense(lookup, table);
  const at::Tensor got = parallel_embedding(lookup.ids, piece, lookup.options, dim, mesh);
  CHECK(close(got.detach(), want.detach()));
  CHECK(close(piece.detach(), piece_of(table.detach(), mesh, cut)));
  const at::Tensor g = sample(want.sizes(), 2);
  want.backward(g);
  got.backward(g);
  CHECK(piece.grad().is_sparse() == lookup.options.sparse);
  CHECK(close(piece.grad().to_dense(), piece_of(table.grad().to_dense(), mesh, cut)));
}

// Holds the subcases of the options that the layer and the function share.
void check_options(const Check& check) {
  Lookup lookup;
  SUBCASE("padding_idx") {
    for (const int64_t padding : {17, -3, 0}) {
      lookup.options.padding_idx = padding;
      for_all_dims(lookup, check);
    }
  }
  SUBCASE("max_norm") {
    for (const double norm : {1.25, 0.5}) {
      lookup.options.max_norm = norm;
      for_all_dims(lookup, check);
    }
    lookup.options = {
        .num_embeddings = 24, .padding_idx = -3, .max_norm = 1.25, .norm_type = 3, .scale_grad_by_freq = true};
    for_all_dims(lookup, check);
  }
  SUBCASE("norm_type") {
    lookup.options.max_norm = 1.5;
    for (const double type : {1.0, 2.0, 3.0}) {
      lookup.options.norm_type = type;
      for_all_dims(lookup, check);
    }
    lookup.options.norm_type = 0;  // the number of elements that are not 0
    lookup.options.max_norm = 7.5;
    for_all_dims(lookup, check);
    lookup.options.norm_type = kInfinity;
    lookup.options.max_norm = 0.5;
    for_all_dims(lookup, check);
    lookup.options.norm_type = -kInfinity;
    lookup.options.max_norm = 0.02;
    for_all_dims(lookup, check);
  }
  SUBCASE("scale_grad_by_freq") {
    lookup.options.scale_grad_by_freq = true;
    for_all_dims(lookup, check);
  }
  SUBCASE("sparse") {
    lookup.options.sparse = true;
    for_all_dims(lookup, check);
  }
}

}  // namespace

TESSERA_RANKS_TEST_CASE("003 ParallelEmbedding", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const Check check = [&](const Lookup& lookup, ParallelDim dim) { check_layer(lookup, dim, mesh); };
  Lookup lookup;
  SUBCASE("num_embeddings") {
    lookup.table = sample({36, 12});
    for_all_dims(lookup, check);
    check_sizes(36, 12, mesh);
  }
  SUBCASE("embedding_dim") {
    lookup.table = sample({24, 24});
    for_all_dims(lookup, check);
    check_sizes(24, 36, mesh);
  }
  check_options(check);
  SUBCASE("_weight") {
    lookup.table = sample({24, 12}, 8);
    for_all_dims(lookup, check);
  }
  SUBCASE("dim = None") {
    ParallelEmbedding layer = parallel_embedding_layer(ParallelEmbeddingOptions(7, 5), std::nullopt, mesh);
    CHECK(placements_of(layer->weight) == Placements{Replicate()});
    CHECK(same(layer->forward(at::arange(7)).detach(), layer->master_weight()));
  }
  SUBCASE("dim = 1 or -1") {
    for (const int64_t dim : {1, -1}) {
      ParallelEmbedding layer = parallel_embedding_layer(ParallelEmbeddingOptions(7, 12), dim, mesh);
      CHECK(placements_of(layer->weight) == Placements{Shard(1)});
      CHECK(same(layer->forward(at::arange(7)).detach(), layer->master_weight()));
    }
  }
  SUBCASE("dim = 0") {
    ParallelEmbedding layer = parallel_embedding_layer(ParallelEmbeddingOptions(12, 7), 0, mesh);
    CHECK(placements_of(layer->weight) == Placements{Shard(0)});
    CHECK(same(layer->forward(at::arange(12)).detach(), layer->master_weight()));
  }
}

TESSERA_RANKS_TEST_CASE("functional.parallel_embedding", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const Check check = [&](const Lookup& lookup, ParallelDim dim) { check_function(lookup, dim, mesh); };
  Lookup lookup;
  SUBCASE("input") {
    lookup.ids = at::remainder(at::arange(12) * 5 + 1, 24).view({2, 3, 2});
    for_all_dims(lookup, check);
  }
  SUBCASE("weight") {
    lookup.table = sample({24, 12}, 8);
    for_all_dims(lookup, check);
  }
  check_options(check);
  SUBCASE("num_embeddings") {  // says where rows lie that the ranks do not have in equal numbers
    lookup.table = sample({10, 12});
    lookup.ids = at::arange(10);
    lookup.options.num_embeddings = 10;
    check(lookup, 0);
  }
  SUBCASE("dim") {
    for_all_dims(lookup, check);
    CHECK_THROWS_WITH_AS(parallel_embedding(lookup.ids, lookup.table, lookup.options, 2, mesh),
                         doctest::Contains("it is 0, 1, -1 or none"), std::invalid_argument);
  }
}
