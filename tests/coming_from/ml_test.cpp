// Tests what the tests of the layers leave out of ml's names, against one process.

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/mappings.h"
#include "tessera/dtensor/random.h"
#include "tessera/layers/init_type.h"
#include "tessera/layers/parallel_embedding.h"
#include "tessera/layers/parallel_linear.h"
#include "tessera/layers/parallelism.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Returns the whole weight that the type of this name gives in every holder.
at::Tensor first_values(const char* type, at::IntArrayRef sizes, const DeviceMesh& mesh) {
  manual_seed(6, mesh.world());
  const at::Tensor weight = tessera::empty(sizes, mesh, {Replicate()}, at::kDouble);
  initialize_(weight, init_type(type));
  return full_tensor(weight);
}

// Compares the layer with at::embedding of its table.
void check_embedding(const ParallelEmbeddingOptions& options, const DeviceMesh& mesh) {
  ParallelEmbedding layer(options, mesh);
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
  CHECK(close(is_dtensor(gradient) ? full_tensor(gradient) : gradient, table.grad()));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("ParallelEmbedding by its width: norms, padding and first values by name", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  ParallelEmbeddingOptions options(10, 12);
  options.config.params_dtype = at::kDouble;
  for (const char* const name : {"uniform", "normal"}) {
    options.init_method = init_method(init_type(name));
    const at::Tensor begun = first_values(name, {10, 12}, mesh);
    manual_seed(6, mesh.world());
    CHECK(same(ParallelEmbedding(options, mesh)->master_weight(), begun));
  }
  check_embedding(options, mesh);
  options.padding_idx = 4;
  options.scale_grad_by_freq = true;
  check_embedding(options, mesh);
  options.max_norm = 0.02;
  for (const double type : {1.0, 2.0, 3.0}) {
    options.norm_type = type;
    check_embedding(options, mesh);
  }
}

TESSERA_RANKS_TEST_CASE("linear layers by ml's options equal one process", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const char* const name : {"xavier_normal", "orthogonal", "biased_normal"}) {
    ColumnParallelOptions columns(12, 24);
    columns.init_method = init_method(init_type(name));
    columns.gather_output = true;
    columns.stride = 2;
    columns.lora_rank = 3;
    RowParallelOptions rows(24, 8);
    rows.init_method = init_method(init_type(name));
    rows.bias = false;
    rows.stride = 2;
    columns.config.params_dtype = rows.config.params_dtype = at::kDouble;
    const at::Tensor of_columns = first_values(name, {24, 12}, mesh), of_rows = first_values(name, {8, 24}, mesh);
    manual_seed(6, mesh.world());
    ColumnParallelLinear column(columns, mesh);
    CHECK(same(column->master_weight(), of_columns));
    manual_seed(6, mesh.world());
    RowParallelLinear row(rows, mesh);
    CHECK(same(row->master_weight(), of_rows));
    {
      const c10::AutoGradMode none(false);
      column->bias.fill_(0.5);
    }
    const at::Tensor x = sample({4, 12});
    const at::Tensor hidden = at::linear(x, column->master_weight(), column->master_bias());
    CHECK(same(column->master_bias(), at::full({24}, 0.5, at::kDouble)));
    CHECK_FALSE(row->master_bias().defined());
    CHECK(close(column->forward(x).detach(), hidden));  // the adapter is 0 at first
    CHECK(close(row->forward(column->forward(x)).detach(), at::linear(hidden, row->master_weight())));
  }
}

TESSERA_RANKS_TEST_CASE("groups by the backends that are named carry what regions send", {4}) {
  init_parallelism({.model = 2,
                    .pipeline = 1,
                    .model_group = {.backend = "gloo"},
                    .pipeline_group = {.backend = "gloo"},
                    .data_group = {.backend = "gloo"},
                    .world = world()});
  CHECK(parallelism_is_initialized());
  const ParallelGroupInfo info = parallel_group_info();
  const int64_t me = world()->rank();
  CHECK(info.mp.global_ranks == std::vector<int64_t>{me / 2 * 2, me / 2 * 2 + 1});
  CHECK(default_group_info()->world_size == 4);
  const at::Tensor mine = at::full({2}, static_cast<double>(me + 1), at::kDouble);
  const double pair = me < 2 ? 3 : 7, across = me % 2 == 0 ? 4 : 6;
  CHECK(same(reduce_from_region(mine, info.mp.mesh), at::full({2}, pair, at::kDouble)));
  CHECK(same(reduce_from_region(mine, info.dp.mesh), at::full({2}, across, at::kDouble)));
  CHECK(same(reduce_from_region(mine, info.pp.mesh), mine));
  for (const GroupInfo& each : {info.mp, info.pp, info.dp}) CHECK(each.mesh.group(0)->getBackendName() == "gloo");
  reset_parallelism();
  CHECK_FALSE(parallelism_is_initialized());
}
