// Counts the collectives that headers state of functions for whole and plain tensors: master_weight and master_bias,
// broadcast_data, and the parts of tensor_chunks.h.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/broadcast_data.h"
#include "tessera/layers/parallel_embedding.h"
#include "tessera/layers/parallel_linear.h"
#include "tessera/layers/tensor_chunks.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/layers/counted.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct StatedRow {
  const char* name;
  std::function<at::Tensor()> call;
  at::Tensor want;
  const char* collectives;  // on several ranks, as counted() writes them; on one rank there are none
};

void check_stated(const StatedRow& row, const DeviceMesh& mesh) {
  CAPTURE(row.name);
  const CommCounter counter(mesh);
  const at::Tensor got = row.call();
  CHECK(counted(counter) == (mesh.size() > 1 ? row.collectives : ""));
  CHECK(same(got, row.want));
}

// Makes a layer with whole values of its own.
template <class Layer, class Options>
Layer layer_of(const Options& options, const at::Tensor& weight, const at::Tensor& bias, const DeviceMesh& mesh) {
  Layer layer(options, mesh);
  const c10::AutoGradMode none(false);
  layer->weight.copy_(spread(weight, mesh, placements_of(layer->weight)));
  layer->bias.copy_(spread(bias, mesh, placements_of(layer->bias)));
  return layer;
}

ParallelEmbedding table_of(const at::Tensor& weight, EmbeddingCut cut, const DeviceMesh& mesh) {
  ParallelEmbeddingOptions options(weight.size(0), weight.size(1));
  options.cut = cut;
  options.allow_uneven = true;
  options.given_weight = weight;
  return ParallelEmbedding(options, mesh);
}

}  // namespace

TESSERA_RANKS_TEST_CASE("whole parameters and parts of plain tensors: one all_gather, or none where each rank has all",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor weight = sample({7, 5}, 1), bias = sample({7}, 2), flat = sample({12}, 3);
  ColumnParallelOptions by_columns(5, 7);
  RowParallelOptions by_rows(5, 7);
  by_columns.allow_uneven = by_rows.allow_uneven = true;
  by_columns.config.params_dtype = by_rows.config.params_dtype = at::kDouble;
  const auto columns = layer_of<ColumnParallelLinear>(by_columns, weight, bias, mesh);
  const auto rows = layer_of<RowParallelLinear>(by_rows, weight, bias, mesh);
  const ParallelEmbedding vocabulary = table_of(weight, EmbeddingCut::kVocabulary, mesh),
                          width = table_of(weight, EmbeddingCut::kWidth, mesh),
                          whole = table_of(weight, EmbeddingCut::kNone, mesh);
  const at::Tensor part = piece_of(flat, mesh, {Shard(0)});
  for (const StatedRow& row : std::vector<StatedRow>{
           {"a column layer's weight", [&] { return columns->master_weight(); }, weight, "1 all_gather"},
           {"a column layer's bias", [&] { return columns->master_bias(); }, bias, "1 all_gather"},
           {"a row layer's weight", [&] { return rows->master_weight(); }, weight, "1 all_gather"},
           {"a row layer's bias", [&] { return rows->master_bias(); }, bias, ""},
           {"a table by the vocabulary", [&] { return vocabulary->master_weight(); }, weight, "1 all_gather"},
           {"a table by the width", [&] { return width->master_weight(); }, weight, "1 all_gather"},
           {"a table that is not cut", [&] { return whole->master_weight(); }, weight, ""},
           {"parts of a tensor",
            [&] {
              return split_into_1d_equal_chunks(flat.view({3, 4}), mesh);
            },
            part, ""},
           {"its parts together", [&] { return gather_split_1d_tensor(part, mesh); }, flat, "1 all_gather"},
       }) {
    check_stated(row, mesh);
  }
}

TESSERA_RANKS_TEST_CASE("broadcast_data: an all_reduce, and broadcasts of dimensions, sizes and elements where any are",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const bool first = mesh.local_rank(0) == 0;
  const std::map<std::string, at::Tensor> whole = {{"labels", at::full({}, 3, on(at::kLong))},
                                                   {"none", at::empty({0, 4}, on(at::kLong))},
                                                   {"tokens", at::arange(6, on(at::kLong)).view({2, 3})}};
  struct Row {
    std::vector<std::string> keys;
    const char* collectives;
    int64_t bytes;  // of the broadcasts: 8 for each key, dimension and element
  };
  for (const Row& row : std::vector<Row>{
           {{"tokens", "none", "labels"}, "1 all_reduce, 3 broadcast", 8 * (3 + 4 + 7)},
           {{"labels"}, "1 all_reduce, 2 broadcast", 8 * (1 + 0 + 1)},
           {{"none"}, "1 all_reduce, 2 broadcast", 8 * (1 + 2 + 0)},
           {{}, "1 all_reduce", 0},
       }) {
    CAPTURE(row.collectives);
    const CommCounter counter(mesh);
    const auto got = broadcast_data(row.keys, first ? whole : std::map<std::string, at::Tensor>(), at::kLong, mesh);
    CHECK(counted(counter) == (mesh.size() > 1 ? row.collectives : ""));
    CHECK(counter.bytes("all_reduce") == (mesh.size() > 1 ? 40 : 0));
    CHECK(counter.bytes("broadcast") == (mesh.size() > 1 && first ? row.bytes : 0));
    CHECK(got.size() == row.keys.size());
    for (const std::string& key : row.keys) CHECK(same(got.at(key), whole.at(key)));
  }
}
