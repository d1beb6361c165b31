#include "tessera/layers/sharded_state_dict.h"

#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/io/optimizer_state.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/layers/parallel_dim.h"
#include "tessera/layers/parallel_embedding.h"
#include "tessera/layers/parallel_linear.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/tests/dtensor/io/shared_folder.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Holds one layer of each kind.
struct Layers : torch::nn::Module {
  Layers(const DeviceMesh& mesh, int64_t stride, bool uneven) {
    ColumnParallelOptions columns(6, uneven ? 7 : 24);
    RowParallelOptions rows(uneven ? 7 : 24, 6);
    columns.stride = rows.stride = stride;
    columns.allow_uneven = rows.allow_uneven = uneven;
    ParallelEmbeddingOptions table(uneven ? 10 : 12, 6);
    table.cut = EmbeddingCut::kVocabulary;
    table.allow_uneven = uneven;
    up = register_module("up", ColumnParallelLinear(columns, mesh));
    down = register_module("down", RowParallelLinear(rows, mesh));
    embedding = register_module("embedding", ParallelEmbedding(table, mesh));
  }
  ColumnParallelLinear up = nullptr;
  RowParallelLinear down = nullptr;
  ParallelEmbedding embedding = nullptr;
};

// Returns the tensor that the writing entries of all ranks for the key make up.
at::Tensor assembled(const std::vector<ShardedTensorEntry>& entries, const std::string& key, at::IntArrayRef sizes,
                     const DeviceMesh& mesh) {
  at::Tensor whole = at::zeros(sizes, on(at::kFloat)), times = at::zeros(sizes, on(at::kFloat));
  for (const ShardedTensorEntry& each : entries) {
    if (each.key != key || each.replica_id != std::array<int64_t, 3>{0, 0, 0}) continue;
    CHECK(each.global_shape == sizes.vec());
    at::Tensor here = whole, count = times;
    for (int64_t dim = 0; dim < whole.dim(); ++dim) {
      here = here.narrow(dim, each.global_offset[static_cast<std::size_t>(dim)], each.local.size(dim));
      count = count.narrow(dim, each.global_offset[static_cast<std::size_t>(dim)], each.local.size(dim));
    }
    here.copy_(each.local);
    count.add_(1);
  }
  CHECK(same(all_reduce(times, mesh, 0, ReduceOp::kSum),
             at::ones(sizes, on(at::kFloat))));  // each element is written once
  return all_reduce(whole, mesh, 0, ReduceOp::kSum);
}

}  // namespace

TESSERA_RANKS_TEST_CASE("the entries of all ranks make each tensor once: even, uneven and in strides", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const auto& [stride, uneven] : std::vector<std::pair<int64_t, bool>>{{1, false}, {2, false}, {1, true}}) {
    const Layers layers(mesh, stride, uneven);
    const std::vector<ShardedTensorEntry> entries = sharded_state_dict(layers, "model.");
    const auto check = [&](const std::string& key, const at::Tensor& whole) {
      CAPTURE(key);
      CHECK(same(assembled(entries, key, whole.sizes(), mesh), whole));
    };
    check("model.up.weight", layers.up->master_weight());
    check("model.up.bias", layers.up->master_bias());
    check("model.down.weight", layers.down->master_weight());
    check("model.down.bias", layers.down->master_bias());
    check("model.embedding.weight", layers.embedding->master_weight());
    for (const ShardedTensorEntry& each : entries) {
      CHECK(each.allow_shape_mismatch == (each.key == "model.embedding.weight"));
      CHECK(each.replica_id[1] == (each.key == "model.down.bias" ? mesh.local_rank(0) : 0));
      CHECK_FALSE(each.local.requires_grad());
    }
  }
}

TESSERA_RANKS_TEST_CASE("on a mesh of two dimensions one rank of those that have a box writes it", {4}) {
  const DeviceMesh plane = mesh_over({2, 2});
  const int64_t dp = plane.local_rank(0), tp = plane.local_rank(1);
  struct Row {
    std::string key;
    Placements layout;
    int64_t replica;  // this rank's number among those that have its box
  };
  const std::vector<Row> rows = {
      {"columns", {Replicate(), Shard(0)}, dp},
      {"by_data", {Shard(1), Replicate()}, tp},
      {"whole", {Replicate(), Replicate()}, 2 * dp + tp},
      {"both", {Shard(0), Shard(1)}, 0},
      {"twice", {Shard(0), Shard(0)}, 0},
  };
  const at::Tensor whole = sample({5, 3}, 1, at::kFloat);
  torch::nn::Module module;
  for (const Row& row : rows) module.register_parameter(row.key, spread(whole, plane, row.layout));
  module.register_buffer("plain", whole.clone());
  const std::vector<ShardedTensorEntry> entries = sharded_state_dict(module);
  CHECK(entries.size() == rows.size() + 1);
  for (const Row& row : rows) {
    CAPTURE(row.key);
    CHECK(same(assembled(entries, row.key, whole.sizes(), line()), whole));
    for (const ShardedTensorEntry& each : entries) {
      if (each.key == row.key) CHECK(each.replica_id == std::array<int64_t, 3>{0, row.replica, 0});
    }
  }
  CHECK(same(assembled(entries, "plain", whole.sizes(), line()), whole));
}

TESSERA_RANKS_TEST_CASE("dimensions before the others, replicas of data, and what cannot be saved", {2}) {
  const DeviceMesh mesh = line();
  const Layers layers(mesh, 1, false);
  const std::vector<ShardedTensorEntry> entries =
      sharded_state_dict(*layers.up, "", {.sharded_offsets = {{.offset = 3, .fragments = 8}}, .data_rank = 5});
  REQUIRE(entries.size() == 2);
  CHECK(entries[0].key == "weight");
  CHECK(entries[0].global_shape == std::vector<int64_t>{8, 24, 6});
  CHECK(entries[0].global_offset == std::vector<int64_t>{3, 12 * mesh.local_rank(0), 0});
  CHECK(entries[0].prepended == 1);
  CHECK(entries[0].replica_id == std::array<int64_t, 3>{0, 0, 5});
  torch::nn::Module mixed;
  mixed.register_module("up", layers.up);
  mixed.register_buffer("plain", at::ones({2}, on(at::kFloat)));  // every rank has it, and one of them writes it
  CHECK(sharded_state_dict(mixed).back().key == "plain");
  CHECK(sharded_state_dict(mixed).back().replica_id == std::array<int64_t, 3>{0, mesh.local_rank(0), 0});
  CHECK(sharded_state_dict(mixed, "", {.tensor_rank = 7}).back().replica_id[1] == 7);
  torch::nn::Module buffers;
  buffers.register_buffer("cut", spread(sample({4}), mesh, {Shard(0)}));
  buffers.register_buffer("plain", at::ones({2}, on(at::kFloat)));
  CHECK(sharded_state_dict(buffers).back().replica_id[1] == mesh.local_rank(0));
  CHECK(sharded_state_dict(*layers.embedding)[0].allow_shape_mismatch);
  CHECK_THROWS_WITH_AS(sharded_state_dict(*layers.up, "", {.sharded_offsets = {{.offset = 2, .fragments = 2}}}),
                       doctest::Contains("offset 2 is outside [0, 2)"), std::invalid_argument);
  torch::nn::Module pending;
  pending.register_buffer("sum", spread(sample({4}), mesh, {Partial()}));
  CHECK_THROWS_WITH_AS(sharded_state_dict(pending), doctest::Contains("a pending reduction"), std::invalid_argument);
  ColumnParallelLinear up = layers.up;
  CHECK_FALSE(up->get_extra_state().defined());
  up->set_extra_state(at::ones({2}, on(at::kFloat)));  // another library's state, which this layer ignores
}

namespace {

// A table of 24 words and a head over them. Where `tied` is true, the head's member is the table's weight; where
// `piece` is true, it is this rank's piece of another tensor.
struct TableAndHead : torch::nn::Module {
  TableAndHead(const DeviceMesh& mesh, bool tied, bool piece = false)
      : table(register_module("table", ParallelEmbedding(ParallelEmbeddingOptions(24, 6), mesh))),
        head(register_module("head", ParallelLinear(6, 24, mesh, ParallelDimOptions{.bias = false, .dim = 1}))) {
    if (tied) head->weight = table->weight;
    if (piece) {
      head->weight = to_local(distribute_tensor(sample({24, 6}, 4, at::kFloat), mesh, placements_of(head->weight)));
    }
  }
  ParallelEmbedding table;
  ParallelLinear head;
};

}  // namespace

TESSERA_RANKS_TEST_CASE("a weight assigned to a layer is what is saved and loaded, not the one left behind",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  TableAndHead saved(mesh, true);
  {
    const c10::NoGradGuard none;
    saved.table->weight.copy_(spread(sample({24, 6}, 2, at::kFloat), mesh, placements_of(saved.table->weight)));
  }
  save_weights(saved, folder / "tied");
  TableAndHead loaded(mesh, true), apart(mesh, false);
  load_weights(loaded, folder / "tied");
  CHECK(same(full_tensor(loaded.head->weight.detach()), sample({24, 6}, 2, at::kFloat)));
  CHECK(loaded.head->weight.is_same(loaded.table->weight));
  CHECK_THROWS_WITH_AS(load_weights(apart, folder / "tied"), doctest::Contains("head.weight"), std::exception);
  for (const ShardedTensorEntry& each : sharded_state_dict(saved)) {
    CHECK(each.local.data_ptr() == to_local(saved.table->weight).data_ptr());
  }
  ParallelEmbeddingOptions by_words(24, 6);
  by_words.cut = EmbeddingCut::kVocabulary;
  TableAndHead of_pieces(mesh, false);
  of_pieces.table = of_pieces.replace_module("table", ParallelEmbedding(by_words, mesh));
  of_pieces.table->weight = to_local(of_pieces.table->weight.detach()).clone();
  CHECK(sharded_state_dict(of_pieces)[0].allow_shape_mismatch);
  CHECK_FALSE(sharded_state_dict(of_pieces)[1].allow_shape_mismatch);
  of_pieces.head->weight = of_pieces.table->weight;
  CHECK(sharded_state_dict(of_pieces)[1].allow_shape_mismatch);
  CHECK(sharded_state_dict(*of_pieces.table)[0].allow_shape_mismatch);
  const TableAndHead with_piece(mesh, false, true);
  save_weights(with_piece, folder / "piece");
  load_weights(apart, folder / "piece");
  CHECK(same(full_tensor(apart.head->weight.detach()), sample({24, 6}, 4, at::kFloat)));
}

namespace {

// Two layers by columns, with and without a bias, to which whole biases or, where `piece` is true, this rank's pieces
// are assigned.
struct Biased : torch::nn::Module {
  Biased(const DeviceMesh& mesh, int64_t seed, bool piece)
      : with(register_module("with", ParallelLinear(6, 7, mesh, options_of(true)))),
        without(register_module("without", ParallelLinear(6, 7, mesh, options_of(false)))) {
    for (ParallelLinear* const layer : {&with, &without}) {
      const at::Tensor whole = sample({7}, seed++, at::kFloat);
      (*layer)->bias = piece ? piece_of(whole, mesh, {Shard(0)}) : spread(whole, mesh, {Replicate()});
    }
  }
  static ParallelDimOptions options_of(bool bias) { return {.bias = bias, .dim = 1, .allow_uneven = true}; }
  ParallelLinear with, without;
};

}  // namespace

TESSERA_RANKS_TEST_CASE("a bias assigned to a layer is what is saved and loaded, also where the layer has none",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  for (const bool piece : {false, true}) {
    CAPTURE(piece);
    const Biased saved(mesh, 2, piece);
    save_weights(saved, folder / "biased");
    Biased loaded(mesh, 5, !piece);
    load_weights(loaded, folder / "biased");
    const auto check = [&](const at::Tensor& bias, int64_t seed) {
      const at::Tensor whole = sample({7}, seed, at::kFloat);
      CHECK(same(is_dtensor(bias) ? full_tensor(bias) : bias, piece ? whole : piece_of(whole, mesh, {Shard(0)})));
    };
    check(loaded.with->bias, 2);
    check(loaded.without->bias, 3);
    const std::vector<ShardedTensorEntry> entries = sharded_state_dict(saved);
    CHECK(same(assembled(entries, "with.bias", {7}, mesh), sample({7}, 2, at::kFloat)));
    CHECK(same(assembled(entries, "without.bias", {7}, mesh), sample({7}, 3, at::kFloat)));
  }
}

TESSERA_RANKS_TEST_CASE("an optimizer's state of tied layers is loaded, whichever layer has left a tensor", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const SharedFolder folder(mesh);
  for (const bool to_head : {false, true}) {
    CAPTURE(to_head);
    TableAndHead saved(mesh, to_head), loaded(mesh, to_head);
    for (TableAndHead* const each : {&saved, &loaded}) {
      if (!to_head) each->table->weight = each->head->weight;
    }
    torch::optim::AdamW first(saved.parameters()), second(loaded.parameters());
    const at::Tensor ids = at::arange(4, on(at::kLong));
    saved.head(saved.table(ids)).square().sum().backward();
    first.step();
    save_optimizer(first, saved, folder / "o");
    load_optimizer(second, loaded, folder / "o");
    CHECK(second.state().size() == 1);
    CHECK(second.state().count(loaded.head->weight.unsafeGetTensorImpl()) == 1);
    save_optimizer(second, loaded, folder / "again");  // names are different
  }
}
