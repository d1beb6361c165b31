// Compares the model with a cache of keys and values with the model without one, in one process and cut over ranks.

#include "tessera/examples/language_model/transformer.h"

#include <cstdint>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>
#include <torch/torch.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/examples/language_model/parallel_plan.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/generate/small_model.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/styles/tp_line.h"

namespace {

using tessera::testing::tp_line;
using tessera::testing::world_size;

double difference(const at::Tensor& a, const at::Tensor& b) { return (a - b).abs().max().item<double>(); }

at::Tensor whole(const at::Tensor& t) { return tessera::is_dtensor(t) ? tessera::full_tensor(t) : t; }

// Feeds `ids`, [batch, length], in parts of the given lengths and returns the logits of all positions.
template <class Model>
at::Tensor in_parts(Model& model, const at::Tensor& ids, const std::vector<int64_t>& lengths, KeyValueCache& cache) {
  std::vector<at::Tensor> logits;
  for (const int64_t length : lengths) {
    logits.push_back(whole(model(ids.narrow(1, cache.length, length), &cache)));
  }
  return torch::cat(logits, 1);
}

int64_t cached_elements(const KeyValueCache& cache) {
  int64_t elements = 0;
  for (const LayerCache& layer : cache.layers) {
    for (const at::Tensor& t : {layer.keys.all, layer.values.all}) {
      elements += (tessera::is_dtensor(t) ? tessera::to_local(t) : t).numel();
    }
  }
  return elements;
}

}  // namespace

TEST_CASE("a cache in one process: the same logits however the tokens are split, also in a second text") {
  const torch::NoGradGuard no_gradient;
  const TransformerOptions options = small_options();
  Transformer model = small_model(options);
  const at::Tensor ids = torch::arange(2 * 12).mul(5).remainder(options.vocabulary).view({2, 12});
  const at::Tensor want = model(ids);
  KeyValueCache cache;
  for (const std::vector<int64_t>& lengths :
       {std::vector<int64_t>{12}, {5, 1, 1, 1, 1, 3}, {1, 2, 3, 4, 2}, {1, 1, 10}}) {
    CAPTURE(lengths.size());
    CHECK(difference(in_parts(model, ids, lengths, cache), want) <= 1e-12);
    CHECK(cache.length == 12);
    cache.length = 0;
  }
  cache.length = 7;  // forgets what follows
  CHECK(difference(in_parts(model, ids, {1, 4}, cache), want.narrow(1, 7, 5)) <= 1e-12);
}

TEST_CASE("a cache holds no more positions than the model has") {
  const torch::NoGradGuard no_gradient;
  const TransformerOptions options = small_options();
  Transformer model = small_model(options);
  const at::Tensor ids = torch::zeros({1, options.sequence}, torch::kLong);
  KeyValueCache cache;
  model(ids, &cache);
  CHECK_THROWS_WITH_AS(model(ids.narrow(1, 0, 1), &cache),
                       "the model takes 16 positions, and was given 17; give fewer tokens, or set the length of the "
                       "cache to 0",
                       std::invalid_argument);
  CHECK_THROWS_AS(model(torch::zeros({1, 17}, torch::kLong)), std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("a cache over ranks: the plain model's logits, no communication more, whole heads a rank",
                        {1, 2, 3, 4}) {
  const torch::NoGradGuard no_gradient;
  for (const bool tied : {false, true}) {
    CAPTURE(tied);
    TransformerOptions options = small_options();
    options.tied = tied;
    const at::Tensor ids = torch::arange(2 * 12).mul(5).remainder(options.vocabulary).view({2, 12});
    Transformer plain = small_model(options), model = small_model(options);
    const at::Tensor want = plain(ids);
    const tessera::DeviceMesh mesh = tp_line();
    auto parallel = tessera::parallelize_module(model, mesh, parallel_plan(options));

    KeyValueCache cache;
    CHECK(difference(in_parts(parallel, ids, {5, 1, 1, 3, 2}, cache), want) <= 1e-12);

    const tessera::CommCounter counter(mesh);
    const at::Tensor without = parallel(ids.narrow(1, 0, 1));
    const int64_t without_cache = counter.total();
    cache.length = 9;
    const at::Tensor with = parallel(ids.narrow(1, 9, 1), &cache);
    CHECK(counter.total() == 2 * without_cache);
    CHECK(counter.count("all_reduce") == counter.total());
    CHECK(without_cache == (world_size() == 1 ? 0 : 1 + 2 * options.layers));
    CHECK(difference(whole(with), want.narrow(1, 9, 1)) <= 1e-12);

    const std::vector<int64_t> heads = small_heads_of_ranks(world_size());
    const int64_t of_head = 2 * options.layers * 2 * options.sequence * (options.hidden / options.heads);
    CHECK(cached_elements(cache) == heads[static_cast<std::size_t>(mesh.local_rank("tp"))] * of_head);
  }
}
