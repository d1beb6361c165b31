// Tests Megatron-Core's vocabulary, chunks, checkpoints and random streams of document 001, with each of their
// parameters, against one process.

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/linear.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/layers/activation_checkpoint.h"
#include "tessera/layers/parallel_embedding.h"
#include "tessera/layers/rng_tracker.h"
#include "tessera/layers/sharded_state_dict.h"
#include "tessera/layers/tensor_chunks.h"
#include "tessera/layers/vocab_range.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/coming_from/one_process.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/layers/checkpointed.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Compares a layer with at::embedding of its table, in a sequence where the config says so.
void check_vocabulary(int64_t rows, int64_t width, const ModelParallelConfig& config, const DeviceMesh& mesh) {
  const at::Tensor ids = at::remainder(at::arange(36) * 7, rows).view({12, 3});
  ParallelEmbedding layer = vocab_parallel_embedding(rows, width, mesh, init_method(InitType::kNormal), config);
  CHECK(layer->weight.sizes() == at::IntArrayRef({rows, width}));
  CHECK(placements_of(layer->weight) == Placements{Shard(0)});
  const at::Tensor table = leaf(layer->master_weight());
  const at::Tensor want = at::embedding(table, ids), got = layer->forward(ids);
  const Placement out = config.sequence_parallel ? Shard(0) : Replicate();
  CHECK(same(got.detach(), piece_of(want.detach(), mesh, {out})));
  const at::Tensor g = sample(want.sizes(), 2);
  want.backward(g);
  got.backward(piece_of(g, mesh, {out}));
  CHECK(close(full_tensor(layer->weight.grad()), table.grad()));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("VocabParallelEmbedding", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  SUBCASE("num_embeddings") {
    for (const int64_t rows : {48, 12}) check_vocabulary(rows, 16, in_double(), mesh);
  }
  SUBCASE("embedding_dim") {
    for (const int64_t width : {16, 5}) check_vocabulary(48, width, in_double(), mesh);
  }
  SUBCASE("config") {
    check_vocabulary(48, 16, {.params_dtype = at::kDouble, .sequence_parallel = true}, mesh);
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      CHECK(
          (vocab_parallel_embedding(12, 6, mesh, quarters(), {.params_dtype = dtype})->weight.scalar_type() == dtype));
    }
  }
  SUBCASE("init_method") {
    const ParallelEmbedding layer = vocab_parallel_embedding(12, 6, mesh, quarters(), in_double());
    CHECK(same(layer->master_weight(), at::full({12, 6}, 0.25, at::kDouble)));
  }
  SUBCASE("forward") {
    ParallelEmbedding layer = vocab_parallel_embedding(12, 6, mesh, init_method(InitType::kNormal), in_double());
    for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{}, {3}, {2, 1, 2}}) {
      const at::Tensor ids = at::full(sizes, 11, at::kLong);
      CHECK(same(layer->forward(ids).detach(), at::embedding(layer->master_weight(), ids)));
    }
  }
  SUBCASE("sharded_state_dict (allow_shape_mismatch)") {
    const ParallelEmbedding layer = vocab_parallel_embedding(48, 16, mesh, quarters());
    const std::vector<ShardedTensorEntry> entries = sharded_state_dict(*layer, "word.");
    REQUIRE(entries.size() == 1);
    CHECK(entries[0].key == "word.weight");
    CHECK(entries[0].global_offset == std::vector<int64_t>{48 / mesh.size() * mesh.local_rank(0), 0});
    CHECK(entries[0].allow_shape_mismatch);
    const torch::nn::Linear other(4, 4);
    CHECK_FALSE(sharded_state_dict(*other).front().allow_shape_mismatch);
  }
}

TEST_CASE("VocabUtility") {
  SUBCASE("vocab_range_from_global_vocab_size") {
    for (int64_t rank = 0; rank < 8; ++rank) {
      CHECK(vocab_range_from_global_vocab_size(1600, rank, 8) == Interval{200 * rank, 200 * rank + 200});
    }
    CHECK_THROWS_WITH_AS(vocab_range_from_global_vocab_size(10, 0, 4), doctest::Contains("10 is not divisible by 4"),
                         std::invalid_argument);
    CHECK(vocab_range_from_global_vocab_size(10, 3, 4, true) == Interval{9, 10});
  }
  SUBCASE("vocab_range_from_per_partition_vocab_size") {
    CHECK(vocab_range_from_per_partition_vocab_size(400, 2, 4) == Interval{800, 1200});
    for (int64_t rank = 0; rank < 8; ++rank) {
      CHECK(vocab_range_from_per_partition_vocab_size(200, rank, 8) ==
            vocab_range_from_global_vocab_size(1600, rank, 8));
    }
  }
}

TEST_CASE("split_tensor_along_last_dim") {
  const at::Tensor x = at::arange(24).view({2, 3, 4});
  SUBCASE("tensor") {
    for (const at::Tensor& each : {x, x[1], x[1][2]}) {
      const std::vector<at::Tensor> parts = split_along_last_dim(each, 2);
      CHECK(at::equal(at::cat(parts, -1), each));
      CHECK(parts[1].is_alias_of(x));
    }
  }
  SUBCASE("num_partitions") {
    for (const int64_t count : {1, 2, 4}) {
      const std::vector<at::Tensor> parts = split_along_last_dim(x, count);
      CHECK(static_cast<int64_t>(parts.size()) == count);
      CHECK(at::equal(parts[0], x.slice(2, 0, 4 / count)));
    }
    CHECK_THROWS_WITH_AS(split_along_last_dim(x, 3), "split_along_last_dim: 4 is not divisible by 3",
                         std::invalid_argument);
  }
  SUBCASE("contiguous_split_chunks") {
    for (const bool contiguous : {false, true}) {
      const at::Tensor second = split_along_last_dim(x, 2, contiguous)[1];
      CHECK(at::equal(second, x.slice(2, 2, 4)));
      CHECK(second.is_contiguous() == contiguous);
      CHECK(second.is_alias_of(x) != contiguous);
    }
  }
}

TESSERA_RANKS_TEST_CASE("split_tensor_into_1d_equal_chunks", {3}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({3, 4 * mesh.size()});
  const at::Tensor want = piece_of(x.view({-1}), mesh, {Shard(0)});
  SUBCASE("tensor") {
    CHECK(same(split_into_1d_equal_chunks(x, mesh), want));
    CHECK(same(split_into_1d_equal_chunks(x.t(), mesh), piece_of(x.t().reshape({-1}), mesh, {Shard(0)})));
  }
  SUBCASE("new_buffer") {
    for (const bool new_buffer : {false, true}) {
      const at::Tensor chunk = split_into_1d_equal_chunks(x, mesh, new_buffer);
      CHECK(same(chunk, want));
      CHECK(chunk.is_alias_of(x) != new_buffer);
    }
  }
}

TESSERA_RANKS_TEST_CASE("gather_split_1d_tensor", {3}) {
  const DeviceMesh mesh = line();
  SUBCASE("tensor") {
    const at::Tensor whole = sample({5 * mesh.size()});
    CHECK(same(gather_split_1d_tensor(piece_of(whole, mesh, {Shard(0)}), mesh), whole));
  }
}

namespace {

using Tensors = std::vector<at::Tensor>;

void check_alike(const Tensors& a, const Tensors& b, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) {
    CAPTURE(i);
    CHECK(same(a.at(i), b.at(i)));
  }
}

}  // namespace

TEST_CASE("CheckpointFunction") {
  const Tensors got = run_checkpointed(true), want = run_checkpointed(false);
  SUBCASE("forward") { check_alike(got, want, 0, 3); }
  SUBCASE("backward") { check_alike(got, want, 3, 7); }
}

TESSERA_RANKS_TEST_CASE("checkpoint", {2, 3}) {
  const DeviceMesh mesh = line();
  SUBCASE("function") {
    int calls = 0;
    const at::Tensor x = leaf(sample({3}));
    const CheckpointFunction cubed = [&](const Tensors& in) -> Tensors {
      ++calls;
      return {in[0].pow(3)};
    };
    const at::Tensor y = checkpoint(cubed, {x})[0];
    CHECK(close(y.detach(), x.detach().pow(3)));
    CHECK(calls == 1);
    y.sum().backward();
    CHECK(close(x.grad(), x.detach().pow(2) * 3));
    CHECK(calls == 2);
  }
  SUBCASE("distribute_saved_activations") {
    CommCounter counter(mesh);
    const Tensors direct = run_checkpointed(false);
    CHECK(counter.total() == 0);
    check_alike(run_checkpointed(true, {.distribute_saved_activations = true, .mesh = mesh}), direct, 0, 7);
    CHECK(counter.count("all_gather") == (mesh.size() == 1 ? 0 : 1));
    CHECK(counter.total() == (mesh.size() == 1 ? 0 : 1));
  }
  SUBCASE("args") {  // the caller's tensors stay as they are, also where the first is distributed
    const at::Tensor x = leaf(sample({4, 4 * mesh.size()})), y = leaf(sample({4, 4 * mesh.size()}, 2));
    const Tensors out = checkpoint([](const Tensors& in) -> Tensors { return {in[0] - in[1] * 2}; }, {x, y},
                                   {.distribute_saved_activations = true, .mesh = mesh});
    CHECK(same(x.detach(), sample({4, 4 * mesh.size()})));
    CHECK(close(out[0].detach(), x.detach() - y.detach() * 2));
    out[0].sum().backward();
    CHECK(same(x.grad(), at::ones_like(x)));
    CHECK(same(y.grad(), at::full_like(y, -2)));
  }
}

namespace {

at::Tensor draw() { return at::randn({12, 21}); }

at::Tensor drawn_from(uint64_t seed) {
  at::manual_seed(seed);
  return draw();
}

at::Tensor drawn_from(RngStatesTracker& tracker, const std::string& stream) {
  const auto fork = tracker.fork(stream);
  return draw();
}

}  // namespace

TEST_CASE("CudaRNGStatesTracker") {
  const at::Tensor of_5 = drawn_from(5), after_of_5 = draw(), of_6 = drawn_from(6);
  RngStatesTracker tracker;
  tracker.add("a", 5);
  SUBCASE("add(name, seed)") {
    tracker.add("b", 6);
    CHECK(same(drawn_from(tracker, "a"), of_5));
    CHECK(same(drawn_from(tracker, "b"), of_6));
    CHECK_THROWS_WITH_AS(tracker.add("a", 7), "RngStatesTracker: rng state a already exists", std::invalid_argument);
    CHECK_THROWS_WITH_AS(tracker.add("c", 5), "RngStatesTracker: seed 5 already exists", std::invalid_argument);
  }
  SUBCASE("fork(name)") {
    at::manual_seed(6);
    CHECK(same(drawn_from(tracker, "a"), of_5));
    CHECK(same(drawn_from(tracker, "a"), after_of_5));
    CHECK(same(draw(), of_6));  // the default generator draws as if there were no fork
    CHECK_THROWS_WITH_AS((void)tracker.fork("b"), doctest::Contains("b is not added; there are [a]"),
                         std::invalid_argument);
  }
  SUBCASE("get_states") {
    const auto states = tracker.get_states();
    CHECK(states.size() == 1);
    CHECK(same(drawn_from(tracker, "a"), of_5));
    CHECK_FALSE(same(tracker.get_states().at("a"), states.at("a")));  // what was returned is a copy
  }
  SUBCASE("set_states") {
    const auto states = tracker.get_states();
    CHECK(same(drawn_from(tracker, "a"), of_5));
    tracker.set_states(states);
    CHECK(same(drawn_from(tracker, "a"), of_5));
  }
  SUBCASE("reset") {
    tracker.reset();
    CHECK(tracker.get_states().empty());
    tracker.add("a", 5);  // neither the name nor the seed is known any more
    CHECK(same(drawn_from(tracker, "a"), of_5));
  }
}

TEST_CASE("get_cuda_rng_tracker") {
  rng_tracker().reset();
  rng_tracker().add("a", 5);
  CHECK(rng_tracker().get_states().size() == 1);
  CHECK(&rng_tracker(c10::kCPU) == &rng_tracker());
  rng_tracker().reset();
}

TESSERA_RANKS_TEST_CASE("get_data_parallel_rng_tracker_name", {2}) {
  const DeviceMesh mesh = line();
  CHECK(data_parallel_rng_tracker_name() == "data-parallel-rng");
  model_parallel_manual_seed(12345, mesh, mesh);
  CHECK(same(drawn_from(rng_tracker(), data_parallel_rng_tracker_name()), drawn_from(12345)));
}

TESSERA_RANKS_TEST_CASE("get_expert_parallel_rng_tracker_name", {2}) {
  const DeviceMesh mesh = line();
  CHECK(expert_parallel_rng_tracker_name() == "expert-parallel-rng");
  model_parallel_manual_seed(12345, mesh, mesh);
  CHECK(same(drawn_from(rng_tracker(), expert_parallel_rng_tracker_name()),
             drawn_from(12345 + 1024 + 101 * static_cast<uint64_t>(mesh.local_rank(0)))));
}

TESSERA_RANKS_TEST_CASE("model_parallel_cuda_manual_seed", {3}) {
  const DeviceMesh mesh = line();
  const auto me = static_cast<uint64_t>(mesh.local_rank(0));
  SUBCASE("seed") {
    for (const uint64_t seed : {12345, 54321}) {
      model_parallel_manual_seed(seed, mesh);
      const at::Tensor outside = draw(), inside = drawn_from(rng_tracker(), kModelParallelRng);
      const at::Tensor global = full_tensor(tessera::rand({5, 3}, mesh, {Shard(0)}));
      CHECK(same(outside, drawn_from(seed)));
      CHECK(same(inside, drawn_from(seed + 2718 + me)));
      model_parallel_manual_seed(seed, mesh);
      CHECK(same(full_tensor(tessera::rand({5, 3}, mesh, {Replicate()})), global));
      model_parallel_manual_seed(seed + 1, mesh);
      CHECK_FALSE(same(full_tensor(tessera::rand({5, 3}, mesh, {Shard(0)})), global));
    }
  }
}
