// Tests what works along the diagonal of two dimensions that are cut: each rank works on its own piece.

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/placement/partition.h"
#include "tessera/tests/dtensor/op_check.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

const Placements kKinds = {R, S0, S1, BlockCyclic(0, 2), BlockCyclic(1, 1), P};
const Placements kKindsOfThree = {R, S0, S1, S2, BlockCyclic(1, 2), P};

Tensors triangles(const at::Tensor& x) {
  Tensors out;
  for (const int64_t diagonal : {-100, -2, 0, 1, 3, 100}) {
    out.push_back(x.tril(diagonal));
    out.push_back(x.triu(diagonal));
  }
  out.push_back(x.clone().tril_(1));
  out.push_back(x.clone().triu_(-1).mul_(2));
  return out;
}

Tensors diagonals(const at::Tensor& x) {
  Tensors out;
  for (const int64_t offset : {-3, -1, 0, 2, 4, 7}) {
    out.push_back(x.diagonal(offset));
    out.push_back(x.diagonal(offset, 1, 0));
    out.push_back(at::diagonal_copy(x, offset, -1, -2) * 2);
  }
  return out;
}

// Returns layouts in which each rank's piece is one block of a matrix of `rows`, or is empty.
std::vector<Placements> blocks(const DeviceMesh& mesh, int64_t rows) {
  std::vector<int64_t> sizes(static_cast<std::size_t>(mesh.size(0)), 0);
  sizes.front() = 1;
  sizes.back() += rows - 1;
  const Placement ragged = RaggedShard(0, sizes);
  if (mesh.ndim() == 1) return {{S0}, {S1}, {ragged}};
  return {{S0, S0}, {S1, S1}, {S0, R}, {P, S1}, {ragged, R}};
}

}  // namespace

TESSERA_RANKS_TEST_CASE("tril and triu of cut dimensions", {1, 2, 3, 4}) {
  const auto of = [](const Tensors& x) { return triangles(x[0]); };
  check_ops(
      {
          op_case("of 7 x 5", {sample({7, 5})}, of, {kKinds}),
          op_case("of 5 x 7", {sample({5, 7})}, of, {kKinds}),
          op_case("of few rows", {sample({2, 3})}, of, {kKinds}),
          op_case("of matrices", {sample({2, 5, 6})}, of, {kKindsOfThree}),
          op_case("of integers", {whole_numbers({6, 6}, at::kLong)}, of, {kKinds}),
          op_case("of no rows", {sample({0, 3})}, of, {kKinds}),
      },
      20);
}

TESSERA_RANKS_TEST_CASE("diagonals of cut dimensions, and matrices that have them", {1, 2, 3, 4}) {
  const auto of = [](const Tensors& x) { return diagonals(x[0]); };
  check_ops(
      {
          op_case("of 7 x 5", {sample({7, 5})}, of, {kKinds}),
          op_case("of 5 x 7", {sample({5, 7})}, of, {kKinds}),
          op_case("of matrices", {sample({5, 6, 2})}, of, {kKindsOfThree}),
          op_case("trace", {sample({7, 5})}, [](const Tensors& x) { return x[0].trace(); }, {kKinds}),
          op_case("trace of integers", {whole_numbers({4, 6}, at::kInt)}, [](const Tensors& x) { return x[0].trace(); },
                  {kKinds}),
          op_case("diag", {sample({6}), sample({4, 5}, 1)},
                  [](const Tensors& x) {
                    return Tensors{x[0].diag(),
                                   x[0].diag(-2),
                                   x[0].diag(1) * 2,
                                   x[1].diag(),
                                   at::diag_embed(x[1]),
                                   at::diag_embed(x[1], 1, 0, 2),
                                   at::diag_embed(x[1], -1, 2, 1)};
                  },
                  {{R, S0, BlockCyclic(0, 2), P}, kKinds}),
      },
      20);
}

TESSERA_RANKS_TEST_CASE("triangles and diagonals of cut matrices communicate nothing, and diagonals are views",
                        {1, 2, 3, 4}) {
  const at::Tensor whole = sample({6, 6});
  for (const DeviceMesh& mesh : meshes()) {
    for (const Placements& placements : blocks(mesh, 6)) {
      for (const int64_t offset : {-2, 0, 1}) {
        CAPTURE(to_string(placements));
        CAPTURE(offset);
        const at::Tensor d = spread(whole.clone(), mesh, placements);
        at::Tensor expected = whole.clone();
        const Strict strict;
        CHECK(placements_of(d.tril(offset)) == placements);
        CHECK(close(full_tensor(d.triu(offset)), expected.triu(offset)));
        CHECK(close(full_tensor(d.trace()), expected.trace()));
        if (placements[0].is_partial()) continue;  // what is added to terms is added to one of them
        d.diagonal(offset).mul_(2).add_(1);
        expected.diagonal(offset).mul_(2).add_(1);
        d.diagonal(0, 1, 0).narrow(0, 1, 3).zero_();
        expected.diagonal(0, 1, 0).narrow(0, 1, 3).zero_();
        d.triu_(-1);
        CHECK(close(full_tensor(d), expected.triu_(-1)));
        CHECK(placements_of(d) == placements);
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("gradients through diagonals that are written", {1, 2, 3, 4}) {
  const at::Tensor whole = sample({6, 4});
  const auto loss = [](const at::Tensor& leaf) {
    at::Tensor x = leaf * 1.5;
    x.diagonal(-1).mul_(-2).add_(1);
    return (x * x).sum() + x.diagonal(1).exp().sum() + x.tril().sin().sum() + x.trace();
  };
  const at::Tensor plain = leaf(whole);
  loss(plain).backward();
  for (const DeviceMesh& mesh : meshes()) {
    for (const Placements& placements : blocks(mesh, 6)) {
      if (placements[0].is_partial()) continue;
      CAPTURE(to_string(placements));
      const at::Tensor d = leaf(whole, mesh, placements);
      loss(d).backward();
      CHECK(close(full_tensor(d.grad()), plain.grad()));
      CHECK(placements_of(d.grad()) == placements);
    }
  }
}

TESSERA_RANKS_TEST_CASE("a symmetric matrix is damped and decomposed, and its gradient comes back", {1, 2, 3, 4}) {
  const auto loss = [](const at::Tensor& leaf) {
    at::Tensor a = leaf.matmul(leaf.t());
    a.diagonal().add_(0.1);
    const auto [values, vectors] = at::linalg_eigh(a);
    return values.log().sum() + (vectors * vectors * vectors * vectors).sum();
  };
  const at::Tensor whole = sample({5, 8}).square().mul(50).sin();  // of full rank
  const at::Tensor plain = leaf(whole);
  loss(plain).backward();
  for (const Placement& cut : {R, S0, S1}) {
    const at::Tensor d = leaf(whole, line(), {cut});
    loss(d).backward();
    CHECK(close(full_tensor(d.grad()), plain.grad()));
  }
}

TESSERA_RANKS_TEST_CASE("tril and triu write out=", {1, 2, 3}) {
  const at::Tensor whole = sample({7, 5});
  for (const Placement& cut : {S0, S1, Placement(BlockCyclic(0, 2))}) {
    const at::Tensor d = spread(whole, line(), {cut});
    at::Tensor out = spread(at::zeros_like(whole), line(), {cut});
    at::tril_out(out, d, -1);
    CHECK(same(full_tensor(out), whole.tril(-1)));
    at::triu_out(out, d, 2);
    CHECK(same(full_tensor(out), whole.triu(2)));
    CHECK(same(full_tensor(d), whole));
  }
}
