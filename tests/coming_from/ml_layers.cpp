// Tests ml's layers of document 000 and the types of their first values, with each of their parameters, against one
// process.

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/init_type.h"
#include "tessera/layers/parallel_embedding.h"
#include "tessera/layers/parallel_linear.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/coming_from/one_process.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/layers/linear_check.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

ParallelEmbeddingOptions table_options(int64_t rows = 10, int64_t width = 12) {
  ParallelEmbeddingOptions options(rows, width);
  options.config.params_dtype = at::kDouble;
  return options;
}

// Compares the layer with at::embedding of its table.
void check_embedding(const ParallelEmbeddingOptions& options, const DeviceMesh& mesh) {
  ParallelEmbedding layer(options, mesh);
  CHECK(layer->weight.sizes() == at::IntArrayRef({options.num_embeddings, options.embedding_dim}));
  const at::Tensor ids = at::remainder(at::arange(20) * 7, options.num_embeddings).view({4, 5});
  const at::Tensor table = leaf(layer->master_weight());
  if (options.max_norm) {
    at::Tensor rows = table.detach();
    at::embedding_renorm_(rows, ids.reshape({-1}), *options.max_norm, options.norm_type);
  }
  const at::Tensor want = at::embedding(table, ids, options.padding_idx.value_or(-1), options.scale_grad_by_freq);
  const at::Tensor got = layer->forward(ids);
  CHECK(close(got.detach(), want.detach()));
  CHECK(close(layer->master_weight(), table.detach()));
  const at::Tensor g = sample(want.sizes(), 2);
  want.backward(g);
  got.backward(g);
  const at::Tensor gradient = layer->weight.grad();
  CHECK_FALSE(gradient.is_sparse());
  CHECK(close(full_tensor(gradient), table.grad()));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("000 ParallelEmbedding", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  ParallelEmbeddingOptions options = table_options();
  SUBCASE("num_embeddings") {
    for (const int64_t rows : {10, 7}) check_embedding(table_options(rows), mesh);
  }
  SUBCASE("embedding_dim") {
    for (const int64_t width : {12, 24}) check_embedding(table_options(10, width), mesh);
  }
  SUBCASE("padding_idx") {
    options.padding_idx = 4;
    check_embedding(options, mesh);
    CHECK(same(ParallelEmbedding(options, mesh)->master_weight()[4], at::zeros({12}, at::kDouble)));
  }
  SUBCASE("max_norm") {
    options.max_norm = 0.5;
    check_embedding(options, mesh);
  }
  SUBCASE("norm_type") {
    options.max_norm = 0.5;
    for (const double type : {1.0, 2.0, 3.0}) {
      options.norm_type = type;
      check_embedding(options, mesh);
    }
  }
  SUBCASE("scale_grad_by_freq") {
    options.scale_grad_by_freq = true;
    check_embedding(options, mesh);
  }
  SUBCASE("sparse") {  // it has no effect: the gradient is dense
    options.sparse = true;
    check_embedding(options, mesh);
  }
  SUBCASE("init_type") {
    for (const char* const name : {"uniform", "normal"}) {
      options.init_method = init_method(init_type(name));
      begin_draws(mesh);
      CHECK(same(ParallelEmbedding(options, mesh)->master_weight(), first_values(options.init_method, {10, 12})));
    }
  }
  SUBCASE("master_weight") {
    ParallelEmbedding layer(options, mesh);
    CHECK_FALSE(layer->master_weight().requires_grad());
    CHECK(same(layer->master_weight(), layer->forward(at::arange(10)).detach()));
  }
  SUBCASE("forward") {
    ParallelEmbedding layer(options, mesh);
    for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{}, {3}, {2, 1, 2}}) {
      const at::Tensor ids = at::full(sizes, 9, at::kLong);
      CHECK(same(layer->forward(ids).detach(), at::embedding(layer->master_weight(), ids)));
    }
  }
}

namespace {

const std::string kReduced = "1 all_reduce", kGathered = "1 all_gather";

ColumnParallelOptions columns(int64_t in = 12, int64_t out = 24) {
  ColumnParallelOptions options = ColumnParallelOptions::ml(in, out);
  options.config.params_dtype = at::kDouble;
  return options;
}

RowParallelOptions rows(int64_t in = 24, int64_t out = 12) {
  RowParallelOptions options(in, out);
  options.config.params_dtype = at::kDouble;
  return options;
}

// Checks that the layer's weight begins with the values that its method gives in one process.
template <class Layer, class Options>
void check_begun(Options options, const DeviceMesh& mesh) {
  for (const char* const name : {"xavier_normal", "orthogonal", "biased_normal"}) {
    options.init_method = init_method(init_type(name));
    begin_draws(mesh);
    const Layer layer(options, mesh);
    CHECK(same(layer->master_weight(), first_values(options.init_method, {options.output_size, options.input_size})));
  }
}

// Checks that master_weight and master_bias are plain, detached, and in the order of features.
template <class Layer>
void check_masters(Layer& layer) {
  stir(*layer);
  const at::Tensor x = sample({4, layer->options.input_size}), weight = layer->master_weight();
  CHECK_FALSE(weight.requires_grad());
  CHECK(close(layer->forward(x).detach(), at::linear(x, weight, full_tensor(layer->bias.detach()))));
  CHECK_FALSE(layer->master_bias().requires_grad());
  CHECK(close(layer->forward(x).detach(), at::linear(x, weight, layer->master_bias())));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("000 ColumnParallelLinear", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const LinearRun run{.forward = kGathered, .backward = kReduced};
  ColumnParallelOptions options = columns();
  SUBCASE("in_features") {
    for (const int64_t in : {12, 5}) check_columns(columns(in), mesh, run);
  }
  SUBCASE("out_features") {
    for (const int64_t out : {12, 24}) check_columns(columns(12, out), mesh, run);
  }
  SUBCASE("bias") {
    options.bias = false;
    check_columns(options, mesh, run);
  }
  SUBCASE("gather_output") {
    check_columns(options, mesh, run);
    options.gather_output = false;
    check_columns(options, mesh, {.backward = kReduced});
    CHECK(ColumnParallelOptions::fairscale(4, 6).gather_output);
    CHECK_FALSE(ColumnParallelOptions::megatron(4, 6).gather_output);
  }
  SUBCASE("init_type") { check_begun<ColumnParallelLinear>(options, mesh); }
  SUBCASE("stride") {
    options.stride = 2;
    check_columns(options, mesh, run);
    options.gather_output = false;  // now the output shows which blocks a rank has
    check_columns(options, mesh, {.backward = kReduced});
  }
  SUBCASE("lora_rank") {
    options.lora_rank = 3;
    check_columns(options, mesh, {.forward = kGathered, .backward = "2 all_reduce"});
    ColumnParallelLinear layer(options, mesh);  // the adapter adds 0 at first
    const at::Tensor x = sample({4, 12});
    CHECK(close(layer->forward(x).detach(), at::linear(x, layer->master_weight())));
  }
  SUBCASE("master_weight") {
    options.stride = 2;
    ColumnParallelLinear layer(options, mesh);
    check_masters(layer);
  }
  SUBCASE("master_bias") {
    ColumnParallelLinear layer(options, mesh);
    check_masters(layer);
    options.bias = false;
    CHECK_FALSE(ColumnParallelLinear(options, mesh)->master_bias().defined());
  }
  SUBCASE("forward") {
    for (const std::vector<int64_t>& batch : std::vector<std::vector<int64_t>>{{}, {5}, {2, 3, 2}}) {
      check_columns(options, mesh, {.forward = kGathered, .backward = kReduced, .batch = batch});
    }
  }
}

TESSERA_RANKS_TEST_CASE("000 RowParallelLinear", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const LinearRun run{.forward = kReduced, .backward = kGathered};
  RowParallelOptions options = rows();
  SUBCASE("in_features") {
    for (const int64_t in : {12, 24}) check_rows(rows(in), mesh, run);
  }
  SUBCASE("out_features") {
    for (const int64_t out : {5, 24}) check_rows(rows(24, out), mesh, run);
  }
  SUBCASE("bias") {
    options.bias = false;
    check_rows(options, mesh, run);
    CHECK_FALSE(RowParallelLinear(options, mesh)->master_bias().defined());
  }
  SUBCASE("input_is_parallel") {
    check_rows(options, mesh, run);
    options.input_is_parallel = true;
    check_rows(options, mesh, {.forward = kReduced});
  }
  SUBCASE("init_type") { check_begun<RowParallelLinear>(options, mesh); }
  SUBCASE("stride") {
    options.stride = 2;
    check_rows(options, mesh, run);
    options.input_is_parallel = true;
    check_rows(options, mesh, {.forward = kReduced});
  }
  SUBCASE("master_weight") {
    options.stride = 2;
    RowParallelLinear layer(options, mesh);
    check_masters(layer);
  }
  SUBCASE("master_bias") {
    RowParallelLinear layer(options, mesh);
    check_masters(layer);
  }
  SUBCASE("forward") {
    for (const std::vector<int64_t>& batch : std::vector<std::vector<int64_t>>{{}, {5}, {2, 3, 2}}) {
      check_rows(options, mesh, {.forward = kReduced, .backward = kGathered, .batch = batch});
    }
  }
}

TESSERA_RANKS_TEST_CASE("example: Embedding, Column, Row equal to Sequential", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  ColumnParallelOptions of_column = columns();
  of_column.gather_output = false;
  RowParallelOptions of_row = rows(24, 8);
  of_row.input_is_parallel = true;
  ParallelEmbedding embedding(table_options(), mesh);
  ColumnParallelLinear column(of_column, mesh);
  RowParallelLinear row(of_row, mesh);
  torch::nn::Embedding table(10, 12);
  torch::nn::Linear up(12, 24), down(24, 8);
  {
    const c10::AutoGradMode none(false);
    table->weight.set_data(embedding->master_weight().clone());
    for (const auto& [plain, layer] : {std::pair{up, static_cast<ParallelLinearBase*>(column.get())},
                                       std::pair{down, static_cast<ParallelLinearBase*>(row.get())}}) {
      at::Tensor(layer->bias).uniform_(-1, 1);
      plain->weight.set_data(layer->master_weight().clone());
      plain->bias.set_data(layer->master_bias().clone());
    }
  }
  torch::nn::Sequential one(table, up, down);
  const at::Tensor ids = at::remainder(at::arange(48) * 7 + 3, 10).view({4, 12});
  CommCounter counter(mesh);
  const at::Tensor got = row->forward(column->forward(embedding->forward(ids)));
  if (mesh.size() > 1) {
    CHECK(counter.count("all_gather") == 1);
    CHECK(counter.count("all_reduce") == 1);
    CHECK(counter.total() == 2);
  }
  const at::Tensor want = one->forward(ids);
  CHECK(close(got.detach(), want.detach()));
  want.pow(2).sum().backward();
  got.pow(2).sum().backward();
  CHECK(close(full_tensor(embedding->weight.grad()), table->weight.grad()));
  CHECK(close(full_tensor(column->weight.grad()), up->weight.grad()));
  CHECK(close(full_tensor(column->bias.grad()), up->bias.grad()));
  CHECK(close(full_tensor(row->weight.grad()), down->weight.grad()));
  CHECK(close(full_tensor(row->bias.grad()), down->bias.grad()));
}

TESSERA_RANKS_TEST_CASE("init_type", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const auto weight = [&](const char* name, at::IntArrayRef sizes) {
    return first_values(init_method(init_type(name)), sizes);
  };
  // Checks that the name stands for a type with the same values on any number of ranks, sharded or not, and returns a
  // large weight.
  const auto checked = [&](const char* name, at::IntArrayRef sizes = {10, 6}) {
    CHECK(to_string(init_type(name)) == name);
    const at::Tensor want = weight(name, sizes);
    for (const Placement& placement : {Shard(0), Shard(1), Replicate()}) {
      CHECK(same(first_values(init_method(init_type(name)), sizes, mesh, placement), want));
    }
    return sizes.size() == 2 ? weight(name, {200, 100}) : want;
  };
  const auto check_spread = [](const at::Tensor& w, double deviation) {
    CHECK(w.std().item<double>() == doctest::Approx(deviation).epsilon(0.03));
    CHECK(std::abs(w.mean().item<double>()) < deviation * 0.05);
  };
  const auto check_uniform = [&](const at::Tensor& w, double deviation) {
    check_spread(w, deviation);
    CHECK(w.abs().max().item<double>() <= deviation * std::sqrt(3.0));
  };
  const auto check_normal = [&](const at::Tensor& w, double deviation) {
    check_spread(w, deviation);
    CHECK(w.abs().max().item<double>() > deviation * 3);
  };
  SUBCASE("orthogonal") {
    const at::Tensor w = checked("orthogonal");
    CHECK(close(at::matmul(w.t(), w), at::eye(100, at::kDouble) * 1e-4, 1e-10));
  }
  SUBCASE("normal") { check_normal(checked("normal"), 0.01); }
  SUBCASE("biased_normal") { check_normal(checked("biased_normal"), 0.01); }
  SUBCASE("uniform") {
    const at::Tensor w = checked("uniform");
    CHECK(w.min().item<double>() >= 0);
    CHECK(w.max().item<double>() < 0.02);
    CHECK(w.mean().item<double>() == doctest::Approx(0.01).epsilon(0.03));
  }
  SUBCASE("kaiming_uniform") { check_uniform(checked("kaiming_uniform"), std::sqrt(2.0 / 100)); }
  SUBCASE("kaiming_normal") { check_normal(checked("kaiming_normal"), std::sqrt(2.0 / 100)); }
  SUBCASE("xavier_uniform") { check_uniform(checked("xavier_uniform"), std::sqrt(2.0 / 300)); }
  SUBCASE("xavier_normal") { check_normal(checked("xavier_normal"), std::sqrt(2.0 / 300)); }
  SUBCASE("trunc_normal") { check_normal(checked("trunc_normal"), 0.01); }  // cut off at 200 deviations
  SUBCASE("dirac") {
    CHECK(same(checked("dirac", {6, 5, 3}), torch::nn::init::dirac_(at::empty({6, 5, 3}, at::kDouble))));
    CHECK_THROWS_WITH(weight("dirac", {10, 6}), doctest::Contains("3"));
  }
  SUBCASE("constant") { CHECK(same(checked("constant"), at::full({200, 100}, 0.02, at::kDouble))); }
  SUBCASE("zeros") { CHECK(same(checked("zeros"), at::zeros({200, 100}, at::kDouble))); }
  SUBCASE("ones") { CHECK(same(checked("ones"), at::ones({200, 100}, at::kDouble))); }
}

TEST_CASE("a type that there is not") {
  CHECK_THROWS_WITH_AS(init_type("glorot"), doctest::Contains("there is no \"glorot\"; there are orthogonal, normal"),
                       std::invalid_argument);
}
