// Tests what the tests of the layers leave out of Megatron-Core's names, against one process.

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/mappings.h"
#include "tessera/dtensor/random.h"
#include "tessera/layers/init_type.h"
#include "tessera/layers/parallel_attributes.h"
#include "tessera/layers/parallel_embedding.h"
#include "tessera/layers/parallel_linear.h"
#include "tessera/layers/sharded_linear.h"
#include "tessera/layers/sharded_state_dict.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Returns results and gradients of two layers, by columns and by rows, with the given options.
std::vector<at::Tensor> run_pair(ColumnParallelOptions up, RowParallelOptions down, const DeviceMesh& mesh) {
  down.input_is_parallel = true;
  manual_seed(3, mesh.world());
  ColumnParallelLinear first(up, mesh);
  RowParallelLinear second(down, mesh);
  const at::Tensor x = leaf(sample({12, 6}));
  const at::Tensor y = second->forward(first->forward(x));
  y.pow(2).sum().backward();
  return {y.detach(), x.grad(), full_tensor(first->weight.grad()), full_tensor(second->weight.grad())};
}

void check_alike(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) CHECK(same(a[i], b[i]));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("settings that say where to compute change nothing", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  ColumnParallelOptions up(6, 12);
  RowParallelOptions down(12, 5);
  up.config.params_dtype = down.config.params_dtype = at::kDouble;
  const std::vector<at::Tensor> plain = run_pair(up, down, mesh);
  CHECK((plain[2].scalar_type() == at::kDouble));
  ColumnParallelOptions other = up;
  other.config.use_cpu_initialization = true;
  check_alike(run_pair(other, down, mesh), plain);
  other.config.async_tensor_model_parallel_allreduce = true;
  check_alike(run_pair(other, down, mesh), plain);
  RowParallelOptions named = down;
  other.tp_comm_buffer_name = "fc1";
  named.tp_comm_buffer_name = "fc2";
  check_alike(run_pair(other, named, mesh), plain);
}

TESSERA_RANKS_TEST_CASE("without initialization nothing is drawn, and parameters lie where they would", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const auto next = [&] { return full_tensor(tessera::rand({5, 3}, mesh, {Shard(0)})); };
  manual_seed(4, mesh.world());
  const at::Tensor first = next();
  manual_seed(4, mesh.world());
  ColumnParallelOptions options(6, 12);
  options.config.perform_initialization = false;
  ColumnParallelLinear layer(options, mesh);
  ModelParallelConfig config;
  config.perform_initialization = false;
  ParallelEmbedding table = vocab_parallel_embedding(12, 6, mesh, init_method(InitType::kNormal), config);
  CHECK(same(next(), first));
  CHECK(tensor_parallel_attributes(layer->weight) ==
        tensor_parallel_attributes(spread(sample({12, 6}), mesh, {Shard(0)})));
  CHECK(placements_of(table->weight) == Placements{Shard(0)});
}

TESSERA_RANKS_TEST_CASE("VocabParallelEmbedding equals an embedding of the whole table, in a sequence too",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor ids = at::remainder(at::arange(36) * 7, 48).view({12, 3});
  for (const bool sequence : {false, true}) {
    const ModelParallelConfig config{.params_dtype = at::kDouble, .sequence_parallel = sequence};
    ParallelEmbedding layer = vocab_parallel_embedding(48, 16, mesh, init_method(InitType::kNormal), config);
    const at::Tensor table = leaf(layer->master_weight());
    const at::Tensor want = at::embedding(table, ids), got = layer->forward(ids);
    const Placement out = sequence ? Shard(0) : Replicate();
    CHECK(same(got.detach(), piece_of(want.detach(), mesh, {out})));
    const at::Tensor g = sample(want.sizes(), 2);
    want.backward(g);
    got.backward(piece_of(g, mesh, {out}));
    CHECK(close(full_tensor(layer->weight.grad()), table.grad()));
    const std::vector<ShardedTensorEntry> entries = sharded_state_dict(*layer, "word.");
    REQUIRE(entries.size() == 1);
    CHECK(entries[0].key == "word.weight");
    CHECK(entries[0].allow_shape_mismatch);
    CHECK(entries[0].global_offset[0] == 48 / mesh.size() * mesh.local_rank(0));
  }
}

TESSERA_RANKS_TEST_CASE("regions of experts: those of sequences over the tensor and expert dimensions as one", {4}) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"ep", "tp"}, world()), both = mesh.merged({0, 1});
  const int64_t me = world()->rank();
  const at::Tensor tokens = sample({8, 3}), g = sample({4, 8, 3}, 2);  // each rank has its own gradient
  const at::Tensor mine = leaf(tokens.chunk(4)[me]);
  const at::Tensor whole = gather_from_sequence_region(mine, both);
  CHECK(same(whole.detach(), tokens));
  whole.backward(g[me]);
  CHECK(close(mine.grad(), g.sum(0).chunk(4)[me]));
  const at::Tensor term = leaf(g[me]);
  const at::Tensor part = reduce_scatter_to_sequence_region(term, both);
  CHECK(close(part.detach(), g.sum(0).chunk(4)[me]));
  part.backward(tokens.chunk(4)[me]);
  CHECK(same(term.grad(), tokens));
}

TESSERA_RANKS_TEST_CASE("a frozen weight has nothing to accumulate", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = leaf(sample({4, 5})), w = sample({12, 5}, 2),
                   main_grad = at::ones({12 / mesh.size(), 5}, at::kDouble);
  const at::Tensor mine = leaf(x.detach()), my_w = leaf(piece_of(w, mesh, {Shard(0)}));
  at::linear(x, w).pow(2).sum().backward();
  const at::Tensor y = sharded_linear(mine, my_w, {}, mesh,
                                      {.reduce_input_gradient = true, .frozen_weight = true, .main_grad = main_grad});
  y.pow(2).sum().backward();
  CHECK(close(mine.grad(), x.grad()));
  CHECK(same(main_grad, at::ones_like(main_grad)));
  CHECK_FALSE(my_w.grad().defined());
}

TESSERA_RANKS_TEST_CASE("layers with an expert size of one, or rows, take what columns take", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  ColumnParallelOptions up(6, 12);
  RowParallelOptions down(12, 5);
  up.config.params_dtype = down.config.params_dtype = at::kDouble;
  const std::vector<at::Tensor> plain = run_pair(up, down, mesh);
  up.is_expert = down.is_expert = true;
  up.config.expert_model_parallel_size = down.config.expert_model_parallel_size = 1;
  check_alike(run_pair(up, down, mesh), plain);  // with one expert rank the layer reduces as others do

  down.stride = 12 % (2 * mesh.size()) == 0 ? 2 : 1;
  down.is_expert = false;
  down.skip_bias_add = true;
  RowParallelLinear rows(down, mesh);
  const at::Tensor x = sample({4, 12});
  const LinearOutput out = rows->forward_with_bias(x);
  CHECK(close((out.output + out.bias).detach(), at::linear(x, rows->master_weight(), rows->master_bias())));
  CHECK_FALSE(rows->get_extra_state().defined());
  rows->set_extra_state(at::ones({2}));
  const std::vector<ShardedTensorEntry> entries =
      sharded_state_dict(*rows, "fc2.", {.sharded_offsets = {{.offset = 1, .fragments = 4}}});
  CHECK(entries.front().key == "fc2.weight");
  CHECK(entries.front().global_shape == std::vector<int64_t>{4, 5, 12});
}
