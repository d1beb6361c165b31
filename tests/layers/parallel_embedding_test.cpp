#include "tessera/layers/parallel_embedding.h"

#include <stdexcept>
#include <string>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/nn/modules/embedding.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

at::Tensor ids_below(int64_t rows, at::IntArrayRef shape) {
  return at::remainder(at::arange(c10::multiply_integers(shape), on(at::kLong)) * 7 + 3, rows).view(shape);
}

ParallelEmbeddingOptions with(int64_t rows, int64_t columns, EmbeddingCut cut) {
  ParallelEmbeddingOptions options(rows, columns);
  options.cut = cut;
  options.config.params_dtype = at::kDouble;
  return options;
}

// Makes a torch::nn::Embedding of the same table.
torch::nn::Embedding dense(const ParallelEmbedding& layer) {
  const ParallelEmbeddingOptions& o = layer->options;
  auto options = torch::nn::EmbeddingOptions(o.num_embeddings, o.embedding_dim)
                     .norm_type(o.norm_type)
                     .scale_grad_by_freq(o.scale_grad_by_freq);
  if (o.padding_idx) options.padding_idx(*o.padding_idx);
  if (o.max_norm) options.max_norm(*o.max_norm);
  torch::nn::Embedding out(options);
  const c10::AutoGradMode none(false);
  out->weight.set_data(layer->master_weight().clone());
  return out;
}

void check_layer(const ParallelEmbeddingOptions& options, const DeviceMesh& mesh) {
  ParallelEmbedding layer(options, mesh);
  const bool by_rows = options.cut == EmbeddingCut::kVocabulary;
  const at::Tensor ids = ids_below(options.num_embeddings, {12, 3});
  for (const bool global : {false, true}) {
    CAPTURE(global);
    torch::nn::Embedding one = dense(layer);
    layer->zero_grad();
    CommCounter counter(mesh);
    const at::Tensor got = layer->forward(global ? spread(ids, mesh, {Shard(0)}) : ids);
    const at::Tensor want = one->forward(ids);
    const bool in_sequence = options.config.sequence_parallel;
    if (!global && mesh.size() > 1 && !options.max_norm) {
      const int64_t wanted = options.cut == EmbeddingCut::kNone ? 0 : 1;
      CHECK(counter.count(in_sequence ? "reduce_scatter" : by_rows ? "all_reduce" : "all_gather") == wanted);
      CHECK(counter.total() == wanted);
    }
    CHECK(is_dtensor(got) == global);
    const Placement out = in_sequence ? Shard(0) : Replicate();
    // A GPU adds the squares of a row in another order.
    const double limit = options.max_norm && !device().is_cpu() ? 1e-6 : 1e-12;
    CHECK(close(global ? full_tensor(got.detach()) : got.detach(),
                global ? want.detach() : piece_of(want.detach(), mesh, {out}), limit));
    const at::Tensor g = sample(want.sizes(), 3);
    want.backward(g);
    counter.reset();
    got.backward(global ? spread(g, mesh, {out}) : piece_of(g, mesh, {out}));
    if (!global && mesh.size() > 1) {
      CHECK(counter.count("all_gather") == (in_sequence ? 1 : 0));
      CHECK(counter.total() == (in_sequence ? 1 : 0));
    }
    CHECK(close(full_tensor(layer->weight.grad()), one->weight.grad()));
    CHECK(close(layer->master_weight(), one->weight.detach(), limit));
  }
}

}  // namespace

TESSERA_RANKS_TEST_CASE("embeddings cut by vocabulary and by width equal torch::nn::Embedding", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const EmbeddingCut cut : {EmbeddingCut::kVocabulary, EmbeddingCut::kWidth, EmbeddingCut::kNone}) {
    CAPTURE(static_cast<int>(cut));
    check_layer(with(12, 24, cut), mesh);
    ParallelEmbeddingOptions uneven = with(10, 7, cut);
    uneven.allow_uneven = true;
    check_layer(uneven, mesh);
    ParallelEmbeddingOptions small = with(2, 2, cut);  // ranks without rows, or columns
    small.allow_uneven = true;
    check_layer(small, mesh);
    for (const int64_t padding : {0L, 5L, -1L}) {
      ParallelEmbeddingOptions padded = uneven;
      padded.padding_idx = padding;
      check_layer(padded, mesh);
    }
    ParallelEmbeddingOptions scaled = uneven;
    scaled.scale_grad_by_freq = true;
    check_layer(scaled, mesh);
    ParallelEmbeddingOptions sparse = uneven;
    sparse.sparse = true;
    check_layer(sparse, mesh);
    ParallelEmbeddingOptions bounded = uneven;
    bounded.max_norm = 0.25;  // torch::nn rounds it to float32
    check_layer(bounded, mesh);
  }
  ParallelEmbeddingOptions in_sequence = with(12, 6, EmbeddingCut::kVocabulary);
  in_sequence.config.sequence_parallel = true;
  check_layer(in_sequence, mesh);
  CHECK_THROWS_WITH_AS(ParallelEmbedding(in_sequence, mesh)->forward(at::scalar_tensor(3, on(at::kLong))),
                       doctest::Contains("give ids [sequence, *]"), std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("tables begin alike on any number of ranks, the padding's row at 0, or as they are given",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const DeviceMesh alone(World::fake(0, 1), device().type(), Mesh({1}));
  for (const EmbeddingCut cut : {EmbeddingCut::kVocabulary, EmbeddingCut::kWidth}) {
    ParallelEmbeddingOptions options = with(12, 6, cut);
    options.allow_uneven = true;
    options.padding_idx = 7;
    manual_seed(9, mesh.world());
    manual_seed(9, alone.world());
    const at::Tensor table = ParallelEmbedding(options, mesh)->master_weight();
    CHECK(same(table, ParallelEmbedding(options, alone)->master_weight()));
    CHECK(same(table[7], at::zeros({6}, on(at::kDouble))));
    options.given_weight = sample({12, 6}, 4);
    const ParallelEmbedding layer(options, mesh);
    CHECK_FALSE(layer->options.given_weight.defined());
    CHECK(same(layer->master_weight(), options.given_weight));
  }
  CHECK(vocab_parallel_embedding(12, 6, mesh, init_method(InitType::kOnes))->options.cut == EmbeddingCut::kVocabulary);
}

TESSERA_RANKS_TEST_CASE("what a table cannot be is refused when it is made", {2}) {
  const DeviceMesh mesh = line();
  const auto refused = [&](const ParallelEmbeddingOptions& options, const std::string& text) {
    CHECK_THROWS_WITH_AS(ParallelEmbedding(options, mesh), doctest::Contains(text.c_str()), std::invalid_argument);
  };
  refused(with(5, 4, EmbeddingCut::kVocabulary), "5 rows are not divisible by 2 ranks");
  refused(with(4, 5, EmbeddingCut::kWidth), "5 columns are not divisible by 2 ranks");
  refused(with(0, 4, EmbeddingCut::kWidth), "at least one row");
  ParallelEmbeddingOptions options = with(4, 4, EmbeddingCut::kWidth);
  options.padding_idx = 4;
  refused(options, "padding_idx 4 must be within num_embeddings, 4");
  options.padding_idx.reset();
  options.given_weight = at::ones({4, 3}, on(at::kFloat));
  refused(options, "given_weight is [4, 3]");
  options.given_weight = at::Tensor();
  options.config.sequence_parallel = true;
  refused(options, "needs a table that is cut by the vocabulary");
}

TESSERA_RANKS_TEST_CASE("rows that are too long are scaled down, also where a rank has none of the ids", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  ParallelEmbeddingOptions options = with(8, 4, EmbeddingCut::kVocabulary);
  options.allow_uneven = true;
  options.max_norm = 0.25;
  ParallelEmbedding layer(options, mesh);
  torch::nn::Embedding one = dense(layer);
  const at::Tensor ids = at::tensor({1, 0, 1}, on(at::kInt));  // the ids of the first rank
  CHECK(close(layer->forward(ids).detach(), one->forward(ids).detach()));
  CHECK(close(layer->master_weight(), one->weight.detach()));
}
