// Tests layer norm over dimensions that are cut: ranks join the moments of the lines of which each has a piece.

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dispatch/explain_op.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/placement/partition.h"
#include "tessera/tests/dtensor/op_check.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

const Placements kOfWeights = {R, S0};

// Returns the results of three overloads, of which one gives the statistics too.
Tensors norms(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto [out, mean, rstd] = at::native_layer_norm(x, weight.sizes(), weight, bias, 1e-5);
  return {out, mean.detach() * 2, rstd.detach() * 2, at::layer_norm(x, weight.sizes()),
          at::layer_norm(x, weight.sizes(), weight) * x};
}

OpCase norm_of(const std::string& name, const at::Tensor& x, int64_t normalized, const Placements& kinds,
               const Placements& of_weights) {
  const at::IntArrayRef shape = x.sizes().slice(static_cast<std::size_t>(x.dim() - normalized));
  return op_case(name, {x, sample(shape, 1) + 1, sample(shape, 2)},
                 [](const Tensors& t) { return norms(t[0], t[1], t[2]); }, {kinds, of_weights, of_weights});
}

}  // namespace

TESSERA_RANKS_TEST_CASE("layer norm of every layout", {1, 2, 3, 4}) {
  check_ops(
      {
          norm_of("long lines", sample({3, 130}), 1, {R, S0, S1, BlockCyclic(1, 3), P}, kOfWeights),
          norm_of("short lines", sample({6, 5}), 1, {R, S0, S1, P}, kOfWeights),
          norm_of("of one element each", sample({6, 1}), 1, {R, S0, S1}, kOfWeights),
          norm_of("two dimensions", sample({3, 70, 4}), 2, {R, S0, S1, S2, P}, {R, S0, S1}),
          norm_of("sequences", sample({2, 5, 66}), 1, {R, S0, S1, S2}, kOfWeights),
          norm_of("one line", sample({150}), 1, {R, S0, P}, kOfWeights),
          norm_of("transposed", sample({130, 4}).t(), 1, {R, S0, S1}, kOfWeights),
      },
      24);
}

TESSERA_RANKS_TEST_CASE("layer norm of pieces that are uneven or empty, and of large numbers", {2, 3, 4}) {
  const DeviceMesh mesh = line();
  std::vector<int64_t> sizes(static_cast<std::size_t>(mesh.size()), 0);
  sizes.back() = 128;
  const at::Tensor weight = sample({128}, 1), bias = sample({128}, 2);
  for (const double offset : {0.0, 1e6}) {
    const at::Tensor whole = sample({4, 128}) + offset;
    const at::Tensor want = at::layer_norm(whole, {128}, weight, bias);
    for (const Placement& cut : {S1, Placement(RaggedShard(1, sizes)), Placement(BlockCyclic(1, 5))}) {
      CAPTURE(to_string(cut));
      const at::Tensor got =
          at::layer_norm(spread(whole, mesh, {cut}), {128}, spread(weight, mesh, {R}), spread(bias, mesh, {R}));
      CHECK(close(full_tensor(got), want, 1e-9));
      CHECK(placements_of(got) == Placements{cut});
    }
  }
}

TESSERA_RANKS_TEST_CASE("layer norm in narrow dtypes, with weights of its own dtype or of float32", {2}) {
  const DeviceMesh mesh = line();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const at::ScalarType of_weight : {dtype, at::kFloat}) {
      const at::Tensor whole = leaf(sample({6, 256}, 0, dtype)), weight = leaf(sample({256}, 1, of_weight));
      const at::Tensor x = leaf(whole.detach(), mesh, {S1}), w = leaf(weight.detach(), mesh, {S0});
      const auto run = [](const at::Tensor& t, const at::Tensor& of) {
        const auto [out, mean, rstd] = at::native_layer_norm(t, {256}, of, {}, 1e-5);
        (out * out).sum().backward();
        return Tensors{out.detach(), mean.detach(), rstd.detach(), t.grad(), of.grad()};
      };
      const Tensors want = run(whole, weight), got = run(x, w);
      const double last_bit = dtype == at::kFloat ? 1e-5 : dtype == at::kHalf ? 4e-3 : 3e-2;
      for (std::size_t i = 0; i < want.size(); ++i) {
        CAPTURE(i);
        CHECK((got[i].scalar_type() == want[i].scalar_type()));
        CHECK(close(full_tensor(got[i]), want[i], last_bit));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("what layer norm over a cut dimension communicates", {4}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = leaf(sample({6, 400}), mesh, {S1});
  const at::Tensor weight = leaf(sample({400}), mesh, {S0});
  const auto counts = [&](const auto& call) { return collectives_of(mesh, call); };
  at::Tensor out;
  CHECK(counts([&] { out = at::layer_norm(x, {400}, weight); }) == "all_gather 104 ");  // of 2 x 6 + 1 numbers
  CHECK(placements_of(out) == Placements{S1});
  const at::Tensor grad = spread(sample({6, 400}, 1), mesh, {S1});
  CHECK(counts([&] { out.backward(grad); }) == "all_reduce 96 ");  // of 2 x 6
  CHECK(placements_of(weight.grad()) == Placements{S0});
  const Strict strict;
  CHECK_THROWS_WITH_AS(at::layer_norm(x, {400}), doctest::Contains("Strict forbids"), std::exception);
}

TESSERA_RANKS_TEST_CASE("a weight of another size or dtype is refused, however the input is cut", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = spread(sample({6, 40}), mesh, {S1});
  const at::Tensor wide = spread(sample({40}), mesh, {R}), narrow = spread(sample({6, 40}, 0, at::kFloat), mesh, {S1});
  CHECK_THROWS_WITH_AS(at::layer_norm(narrow, {40}, wide), doctest::Contains("mixed dtype"), std::exception);
  CHECK_THROWS_WITH_AS(at::layer_norm(x, {40}, spread(sample({1}), mesh, {R})), doctest::Contains("weight"),
                       std::exception);
}
