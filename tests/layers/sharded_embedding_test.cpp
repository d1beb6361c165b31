#include "tessera/layers/sharded_embedding.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct Case {
  std::string name;
  int64_t rows = 10;
  int64_t columns = 7;
  ShardedEmbeddingOptions options;
};

at::Tensor ids_below(int64_t rows, at::IntArrayRef shape) {
  return at::remainder(at::arange(c10::multiply_integers(shape), on(at::kLong)) * 7 + 3, rows).view(shape);
}

// Computes torch::embedding of the whole table, renormalized first as in torch::nn::Embedding.
at::Tensor dense(const at::Tensor& ids, const at::Tensor& table, const ShardedEmbeddingOptions& options) {
  if (options.max_norm) {
    at::Tensor rows = table.detach();
    at::embedding_renorm_(rows, ids.reshape({-1}), *options.max_norm, options.norm_type);
  }
  const int64_t given = options.padding_idx.value_or(-1);
  const int64_t padding = options.padding_idx && given < 0 ? given + table.size(0) : given;
  return at::embedding(table, ids, padding, options.scale_grad_by_freq, options.sparse);
}

void check_case(Case c, EmbeddingCut cut, const DeviceMesh& mesh) {
  CAPTURE(c.name);
  CAPTURE(static_cast<int>(cut));
  c.options.cut = cut;
  c.options.num_embeddings = c.rows;
  c.options.embedding_dim = c.columns;
  const int64_t dim = cut == EmbeddingCut::kVocabulary ? 0 : 1;
  const at::Tensor ids = ids_below(c.rows, {4, 5});
  const at::Tensor table = leaf(sample({c.rows, c.columns}, 1));
  const at::Tensor mine = leaf(piece_of(table.detach(), mesh, {Shard(dim)}));
  const at::Tensor want = dense(ids, table, c.options);
  CommCounter counter(mesh);
  const at::Tensor got = sharded_embedding(ids, mine, mesh, c.options);
  CAPTURE(counter.to_string());
  const int64_t many = mesh.size() > 1 ? 1 : 0;
  const bool renormalizes = c.options.max_norm && cut == EmbeddingCut::kWidth;
  CHECK(counter.count(cut == EmbeddingCut::kVocabulary ? "all_reduce" : "all_gather") == many);
  CHECK(counter.total() == many * (renormalizes ? 2 : 1));
  CHECK(close(got.detach(), want.detach()));
  CHECK(close(mine.detach(), piece_of(table.detach(), mesh, {Shard(dim)})));  // max_norm wrote the piece
  const at::Tensor g = sample(want.sizes(), 2);
  want.backward(g);
  counter.reset();
  got.backward(g);
  CHECK(counter.total() == 0);
  CHECK(mine.grad().is_sparse() == c.options.sparse);
  CHECK(close(mine.grad().to_dense(), piece_of(table.grad().to_dense(), mesh, {Shard(dim)})));
}

}  // namespace

TESSERA_RANKS_TEST_CASE("tables cut by vocabulary and by width: results, gradients and collectives", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const EmbeddingCut cut : {EmbeddingCut::kVocabulary, EmbeddingCut::kWidth}) {
    for (const Case& c : std::vector<Case>{
             {.name = "even", .rows = 12, .columns = 12},
             {.name = "uneven"},
             {.name = "fewer rows and columns than ranks", .rows = 2, .columns = 1},
             {.name = "scaled by frequency", .options = {.scale_grad_by_freq = true}},
             {.name = "sparse", .options = {.sparse = true}},
             {.name = "max_norm", .options = {.max_norm = 1.2}},
             {.name = "max_norm by sums", .options = {.max_norm = 2, .norm_type = 1}},
             {.name = "max_norm by the greatest",
             .options = {.max_norm = 0.5, .norm_type = std::numeric_limits<double>::infinity()}},
         }) {
      check_case(c, cut, mesh);
    }
  }
}

TESSERA_RANKS_TEST_CASE("padding_idx_on_the_wrong_rank: every id of the table can be the padding", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const EmbeddingCut cut : {EmbeddingCut::kVocabulary, EmbeddingCut::kWidth}) {
    for (int64_t padding = -10; padding < 10; padding += padding == -1 ? 1 : 3) {
      check_case({.name = std::to_string(padding), .options = {.padding_idx = padding}}, cut, mesh);
    }
  }
}

TESSERA_RANKS_TEST_CASE("the local result is a term, or columns, of the whole one", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor table = sample({9, 6}), ids = ids_below(9, {4});
  const auto part = [&](EmbeddingCut cut, int64_t dim) {
    return sharded_embedding_local(ids, piece_of(table, mesh, {Shard(dim)}), mesh,
                                   {.cut = cut, .num_embeddings = 9, .embedding_dim = 6});
  };
  const at::Tensor want = at::embedding(table, ids);
  CHECK(same(full_tensor(from_local(part(EmbeddingCut::kVocabulary, 0), mesh, {Partial()})), want));
  CHECK(same(part(EmbeddingCut::kWidth, 1), piece_of(want, mesh, {Shard(1)})));
}

TESSERA_RANKS_TEST_CASE("norms of half precision are those of float32", {1, 2}) {
  const DeviceMesh mesh = line();
  for (const EmbeddingCut cut : {EmbeddingCut::kVocabulary, EmbeddingCut::kWidth}) {
    for (const double scale : {200.0, 1e-4}) {
      const at::Tensor table = at::full({4, 8}, scale, on(at::kHalf)), ids = at::arange(4, on(at::kLong));
      const at::Tensor mine = piece_of(table, mesh, {Shard(cut == EmbeddingCut::kVocabulary ? 0 : 1)}).clone();
      const at::Tensor got = sharded_embedding(ids, mine, mesh, {.cut = cut, .max_norm = scale});
      CHECK(close(got.to(at::kDouble), at::full({4, 8}, scale / std::sqrt(8.0), on(at::kDouble)), 2e-3));
    }
  }
}

TESSERA_RANKS_TEST_CASE("no ids, and ids of other integers", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor table = sample({4, 3}), mine = piece_of(table, mesh, {Shard(0)});
  CHECK(sharded_embedding(at::empty({0, 2}, on(at::kLong)), mine, mesh).sizes() == at::IntArrayRef({0, 2, 3}));
  CHECK(same(sharded_embedding(at::arange(4, on(at::kInt)), mine, mesh), table));
}

TESSERA_RANKS_TEST_CASE("one_rank_errors: an id outside the table is an error on every rank, as is what does not fit",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor mine = at::ones({4, 3}, on(at::kFloat));
  const auto refused = [&](const at::Tensor& ids, const std::string& text,
                           const ShardedEmbeddingOptions& options = {}) {
    CHECK_THROWS_WITH_AS(sharded_embedding(ids, mine, mesh, options), doctest::Contains(text.c_str()),
                         std::invalid_argument);
  };
  const int64_t rows = 4 * mesh.size();
  CommCounter counter(mesh);
  refused(at::full({2}, rows, on(at::kLong)), "is outside the table of", {.num_embeddings = rows});
  refused(at::full({2}, -1, on(at::kLong)), "id -1 is outside the table", {.num_embeddings = rows});
  refused(at::ones({2}, on(at::kFloat)), "ids have dtype Float");
  refused(at::ones({2}, on(at::kLong)), "must be within num_embeddings", {.num_embeddings = rows, .padding_idx = rows});
  refused(from_local(at::ones({2}, on(at::kLong)), mesh, {Replicate()}), "a DTensor was given");
  CHECK(counter.total() == 0);
}
