// Tests what the tests of the layers leave out of TorchShard's names, against one process.

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <doctest/doctest.h>
#include <torch/nn/init.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random.h"
#include "tessera/layers/parallel_dim.h"
#include "tessera/layers/parallel_embedding.h"
#include "tessera/layers/parallelism.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Returns the options of an embedding one by one; the sixth has all of them but `sparse`.
std::vector<ShardedEmbeddingOptions> embedding_options() {
  std::vector<ShardedEmbeddingOptions> all(9, ShardedEmbeddingOptions{.num_embeddings = 24});
  all[0].padding_idx = 17;
  all[1].max_norm = 1.25;
  all[2].max_norm = 1.5;
  all[2].norm_type = 1;
  all[3].scale_grad_by_freq = true;
  all[4].sparse = true;
  all[5] = {.num_embeddings = 24, .padding_idx = -3, .max_norm = 1.25, .norm_type = 3, .scale_grad_by_freq = true};
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  all[6] = {.num_embeddings = 24, .max_norm = 7.5, .norm_type = 0};  // norm_type 0 counts the elements that are not 0
  all[7] = {.num_embeddings = 24, .max_norm = 0.5, .norm_type = kInfinity};
  all[8] = {.num_embeddings = 24, .max_norm = 0.02, .norm_type = -kInfinity};
  return all;
}

// Computes LibTorch's embedding of the whole table, whose rows max_norm writes.
at::Tensor dense(const at::Tensor& ids, const at::Tensor& table, const ShardedEmbeddingOptions& o) {
  if (o.max_norm) {
    at::Tensor rows = table.detach();
    at::embedding_renorm_(rows, ids.reshape({-1}), *o.max_norm, o.norm_type);
  }
  const int64_t padding = o.padding_idx ? (*o.padding_idx + 24) % 24 : -1;
  return at::embedding(table, ids, padding, o.scale_grad_by_freq, o.sparse);
}

ParallelEmbeddingOptions layer_options(const ShardedEmbeddingOptions& o, const at::Tensor& table) {
  ParallelEmbeddingOptions options(24, 12);
  options.padding_idx = o.padding_idx;
  options.max_norm = o.max_norm;
  options.norm_type = o.norm_type;
  options.scale_grad_by_freq = o.scale_grad_by_freq;
  options.sparse = o.sparse;
  options.given_weight = table;
  options.config.params_dtype = at::kDouble;
  return options;
}

void check_embedding(const ShardedEmbeddingOptions& options, ParallelDim dim, const DeviceMesh& mesh) {
  const at::Tensor ids = at::remainder(at::arange(40) * 7, 24).view({8, 5});
  const at::Tensor start = sample({24, 12}).masked_fill(at::remainder(at::arange(24 * 12), 5).le(1).view({24, 12}), 0);
  const at::Tensor table = leaf(start), g = sample({8, 5, 12}, 2);
  const Placements cut = {dim ? Shard(*dim < 0 ? 1 : *dim) : Replicate()};
  const at::Tensor piece = leaf(piece_of(start, mesh, cut));
  const at::Tensor want = dense(ids, table, options);
  const at::Tensor got = parallel_embedding(ids, piece, options, dim, mesh);
  ParallelEmbedding layer = parallel_embedding_layer(layer_options(options, start), dim, mesh);
  const at::Tensor of_layer = layer->forward(ids);
  CHECK(close(got.detach(), want.detach()));
  CHECK(close(of_layer.detach(), want.detach()));
  CHECK(close(layer->master_weight(), table.detach()));
  want.backward(g);
  got.backward(g);
  CHECK(piece.grad().is_sparse() == options.sparse);
  CHECK(close(piece.grad().to_dense(), piece_of(table.grad().to_dense(), mesh, cut)));
  of_layer.backward(g);
  CHECK(close(full_tensor(layer->weight.grad()), table.grad().to_dense()));  // a DTensor's gradient is dense
}

}  // namespace

TESSERA_RANKS_TEST_CASE("embeddings of every dim and option equal LibTorch's", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  std::size_t index = 0;
  for (const ShardedEmbeddingOptions& options : embedding_options()) {
    CAPTURE(index++);
    for (const ParallelDim dim : {ParallelDim(), ParallelDim(0), ParallelDim(1), ParallelDim(-1)}) {
      check_embedding(options, dim, mesh);
    }
  }
}

TESSERA_RANKS_TEST_CASE("the loss by the older arguments, as a module and as a function", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor target = at::remainder(at::arange(13) * 5, 17), weight = at::rsub(sample({17}, 2), 1.5);
  const at::Tensor logits = sample({13, 17}) * 1000, cut = spread(logits, mesh, {Shard(1)});
  for (const std::optional<bool> size_average : {std::optional<bool>(), std::optional(true), std::optional(false)}) {
    for (const std::optional<bool> reduce : {std::optional<bool>(), std::optional(true), std::optional(false)}) {
      ParallelCrossEntropyOptions options{.weight = weight, .ignore_index = 5};
      options.reduction = legacy_reduction(size_average, reduce).value_or(at::Reduction::Mean);
      const auto wanted = reduce == std::optional(false)         ? at::Reduction::None
                          : size_average == std::optional(false) ? at::Reduction::Sum
                                                                 : at::Reduction::Mean;
      const at::Tensor want = at::cross_entropy_loss(logits, target, weight, wanted, 5);
      CHECK(close(parallel_cross_entropy(cut, target, options), want));
      CHECK(close(ParallelCrossEntropyLoss(options)->forward(cut, target), want));
      CHECK(same(ParallelCrossEntropyLoss(options)->forward(logits, target), want));
    }
  }
}

TESSERA_RANKS_TEST_CASE("first values of a cut tensor are those of the whole, whatever the method takes",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line(), alone(World::fake(0, 1), c10::kCPU, Mesh({1}));
  const double bound = 0.3;
  const InitMethod method = [=](const at::Tensor& t) { torch::nn::init::uniform_(t, -bound, bound); };
  const auto begun = [&](const DeviceMesh& on, const Placement& placement) {
    manual_seed(6, on.world());
    const at::Tensor tensor = tessera::empty({12, 7}, on, {placement}, at::kDouble);
    shard_init_(method, tensor);
    return full_tensor(tensor);
  };
  const at::Tensor want = begun(alone, Replicate());
  CHECK(want.abs().max().item<double>() <= bound);
  for (const Placement& placement : {Shard(0), Shard(1), Replicate()}) CHECK(same(begun(mesh, placement), want));
  const at::Tensor plain = at::zeros({3});
  shard_init_([](const at::Tensor& t) { torch::nn::init::ones_(t); }, plain);
  CHECK(same(plain, at::ones({3})));
}

TESSERA_RANKS_TEST_CASE("groups of some ranks: layers over them equal one process", {4}) {
  const DeviceMesh mesh = init_parallelism({.model = 2, .world = world()});
  const DeviceMesh group = parallel_group_info().mp.mesh;
  ParallelLinear layer(6, 8, group, ParallelDimOptions{.dim = 0});
  layer->to(at::kDouble);
  const at::Tensor x = sample({3, 6}, world()->rank() / 2);  // each group has its own rows
  const at::Tensor want = at::linear(x, full_tensor(layer->weight.detach()), full_tensor(layer->bias.detach()));
  CHECK(close(full_tensor(layer->forward(x).detach()), want));
  reset_parallelism();
}

TESSERA_RANKS_TEST_CASE("TensorFloat32 is left as LibTorch has it", {2}) {
  const DeviceMesh mesh = line();
  for (const bool allowed : {false, true}) {
    at::globalContext().setAllowTF32CuBLAS(allowed);
    ParallelLinear layer(6, 8, mesh, ParallelDimOptions{.dim = 1});
    layer->forward(sample({3, 6}, 1, at::kFloat));
    CHECK(at::globalContext().allowTF32CuBLAS() == allowed);
  }
  at::globalContext().setAllowTF32CuBLAS(false);
}
