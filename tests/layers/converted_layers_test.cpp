// Tests the conversion of modules of torch::nn into layers that are sharded along a dimension.

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <vector>

#include <ATen/ops/arange.h>
#include <c10/core/GradMode.h>
#include <doctest/doctest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/parallel_dim.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Has a table, a layer on top of it, and a layer whose name is a pattern that matches the table's.
struct LookupImpl : torch::nn::Module {
  LookupImpl() {
    register_module("t1", table);
    register_module("t[1]", layer);
  }
  at::Tensor forward(const at::Tensor& ids) { return layer(table(ids)); }
  torch::nn::Embedding table{10, 6};
  torch::nn::Linear layer{6, 8};
};
TORCH_MODULE(Lookup);

}  // namespace

TESSERA_RANKS_TEST_CASE("one call converts linear layers and embeddings, and a second call is refused", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor ids = at::arange(10, on(at::kLong));
  const std::vector<ConvertedDims> all = {
      {.linear = 1, .embedding = 0}, {.linear = 0, .embedding = 1}, {.linear = 1}, {.embedding = 1}, {}};
  for (std::size_t i = 0; i < all.size(); ++i) {
    CAPTURE(i);
    const ConvertedDims& dims = all[i];
    Lookup module, plain;
    for (Lookup& each : std::vector<Lookup>{module, plain}) {
      const c10::AutoGradMode none(false);
      each->to(device(), at::kDouble);
      for (const at::Tensor& t : each->parameters()) at::Tensor(t).copy_(sample(t.sizes(), 3));
    }
    auto converted = convert_parallel_layers(module, dims, mesh);
    // The weight of a Linear is A transposed.
    CHECK(get_parallel_dim(module->layer->weight) == (dims.linear ? ParallelDim(1 - *dims.linear) : std::nullopt));
    CHECK(get_parallel_dim(module->table->weight) == dims.embedding);
    CHECK(close(full_tensor(converted(ids).detach()), plain(ids).detach()));
    if (dims.linear) {
      CHECK_THROWS_WITH_AS(convert_parallel_linear(module, 1, mesh), doctest::Contains("is a DTensor already"),
                           std::invalid_argument);
    }
  }
}

TESSERA_RANKS_TEST_CASE("a dim that only one rank gives wrongly is refused on every rank", {2, 3}) {
  const DeviceMesh mesh = line();
  torch::nn::Linear layer(4, 4);
  layer->to(device());
  const ParallelDim dim = rank() == 1 ? 2 : 1;
  CHECK_THROWS_WITH_AS(convert_parallel_linear(layer, dim, mesh),
                       doctest::Contains("rank 1: convert_parallel_linear: dim 2; it is 0, 1, -1 or none"),
                       std::invalid_argument);
  CHECK_NOTHROW(convert_parallel_linear(layer, 1, mesh));
}
