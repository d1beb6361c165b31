// Tests the cases that PyTorch's own tests of DTensor state, with values and numbers of collectives.

#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Shapes in which the dimension `sharded` has 12, 13 or 14 elements over 4 ranks.
struct Uneven {
  std::vector<int64_t> shape;
  Placement sharded;
};
std::vector<Uneven> uneven() {
  std::vector<Uneven> out;
  for (const int64_t n : {12, 13, 14}) {
    out.push_back({{n, 3}, S0});
    out.push_back({{3, n}, S1});
  }
  return out;
}

// Returns a leaf of that layout.
at::Tensor distributed_leaf(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  at::Tensor t = distribute_tensor(whole, mesh, placements, kNoSource);
  t.requires_grad_(true);
  return t;
}

bool only(const CommCounter& counter, const char* kind, int64_t times) {
  return counter.count(kind) == times && counter.total() == times;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("1: Shard to Replicate is one all_gather, and its gradient needs none", {4}) {
  const DeviceMesh mesh = line();
  for (const Uneven& row : uneven()) {
    CAPTURE(row.shape);
    const at::Tensor whole = sample(row.shape);
    const at::Tensor source = distributed_leaf(whole, mesh, {row.sharded});
    CommCounter counter(mesh);
    const at::Tensor all = redistribute(source, {R});
    CHECK(only(counter, "all_gather", 1));
    CHECK(same(to_local(all), whole));
    counter.reset();
    to_local(all).sum().backward();
    CHECK(counter.total() == 0);
    CHECK(placements_of(source.grad()) == Placements{row.sharded});
    CHECK(same(to_local(source.grad()), at::ones(to_local(source).sizes(), on(at::kDouble))));
    const at::Tensor complex = whole_numbers(row.shape, at::kComplexFloat);
    CHECK(same(full_tensor(spread(complex, mesh, {row.sharded})), complex));
  }
}

TESSERA_RANKS_TEST_CASE("2: Replicate to Shard keeps the chunk without communication; its gradient is one all_gather",
                        {4}) {
  const DeviceMesh mesh = line();
  for (const Uneven& row : uneven()) {
    CAPTURE(row.shape);
    const at::Tensor whole = sample(row.shape);
    const at::Tensor source = distributed_leaf(whole, mesh, {R});
    CommCounter counter(mesh);
    const at::Tensor piece = redistribute(source, {row.sharded});
    CHECK(counter.total() == 0);
    const auto chunks = whole.chunk(4, row.sharded.tensor_dim());
    const auto me = static_cast<std::size_t>(mesh.local_rank(0));
    CHECK(same(to_local(piece), me < chunks.size() ? chunks[me] : whole.narrow(row.sharded.tensor_dim(), 0, 0)));
    to_local(piece).sum().backward();
    CHECK(only(counter, "all_gather", 1));
    CHECK(placements_of(source.grad()) == Placements{R});
    CHECK(same(to_local(source.grad()), at::ones(row.shape, on(at::kDouble))));
  }
}

TESSERA_RANKS_TEST_CASE("3: Partial to Shard is one reduce_scatter, uneven too", {4}) {
  const DeviceMesh mesh = line();
  for (const Uneven& row : uneven()) {
    CAPTURE(row.shape);
    const at::Tensor source = from_local(at::ones(row.shape, on(at::kFloat)), mesh, {P});
    CommCounter counter(mesh);
    const at::Tensor piece = redistribute(source, {row.sharded});
    CHECK(only(counter, "reduce_scatter", 1));
    CHECK(same(to_local(piece), piece_of(at::ones(row.shape, on(at::kFloat)) * 4, mesh, {row.sharded})));
  }
}

TESSERA_RANKS_TEST_CASE("4: Partial to Replicate is one all_reduce, and its gradient needs none", {4}) {
  const DeviceMesh mesh = line();
  at::Tensor local = at::ones({12, 3}, on(at::kFloat));
  local.requires_grad_(true);
  const at::Tensor source = from_local(local, mesh, {P});
  CommCounter counter(mesh);
  const at::Tensor all = redistribute(source, {R});
  CHECK(only(counter, "all_reduce", 1));
  CHECK(same(to_local(all), at::ones({12, 3}, on(at::kFloat)) * 4));
  counter.reset();
  to_local(all).sum().backward();
  CHECK(counter.total() == 0);
  CHECK(same(local.grad(), at::ones({12, 3}, on(at::kFloat))));
}

TESSERA_RANKS_TEST_CASE("5: redistributing to the layout that is there communicates nothing, forward and backward",
                        {4}) {
  const DeviceMesh mesh = line();
  for (const Placement& placement : {R, P}) {
    at::Tensor local = at::ones({12, 3}, on(at::kFloat));
    local.requires_grad_(true);
    const CommCounter counter(mesh);
    const at::Tensor again = redistribute(from_local(local, mesh, {placement}), {placement});
    to_local(again).sum().backward();
    CHECK(counter.total() == 0);
    CHECK(same(local.grad(), at::ones({12, 3}, on(at::kFloat))));
  }
}

TESSERA_RANKS_TEST_CASE("6: a gradient said to be Partial is reduced once", {4}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = distributed_leaf(at::ones({8, 3}, on(at::kFloat)), mesh, {R});
  CommCounter counter(mesh);
  to_local(redistribute(whole, {R}), Placements{P}).sum().backward();
  CHECK(only(counter, "all_reduce", 1));
  CHECK(placements_of(whole.grad()) == Placements{R});
  CHECK(same(to_local(whole.grad()), at::ones({8, 3}, on(at::kFloat)) * 4));

  const at::Tensor split = distributed_leaf(at::ones({8, 3}, on(at::kFloat)), mesh, {S0});
  counter.reset();
  const at::Tensor all = to_local(redistribute(split, {R}), Placements{P});
  CHECK(only(counter, "all_gather", 1));
  counter.reset();
  all.sum().backward();
  CHECK(only(counter, "reduce_scatter", 1));
  CHECK(same(to_local(split.grad()), at::ones({2, 3}, on(at::kFloat)) * 4));
}

TESSERA_RANKS_TEST_CASE("8: two mesh dimensions over uneven tensors, smaller than the mesh too", {4}) {
  const DeviceMesh mesh = mesh_over({2, 2});
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{10, 5}, {9, 5}, {3, 5}, {1, 3}}) {
    for (const Placements& placements : {Placements{S0, S0}, {S0, S1}, {S1, S0}}) {
      CAPTURE(shape);
      CAPTURE(to_string(placements));
      const at::Tensor whole = sample(shape);
      for (const int64_t source : {kMeshFirstRank, kNoSource}) {
        const at::Tensor t = distribute_tensor(whole, mesh, placements, source);
        CHECK(same(to_local(t), piece_of(whole, mesh, placements)));
        CHECK(same(full_tensor(t), whole));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("9: Shard to another Shard is one all_to_all", {4}) {
  const DeviceMesh mesh = line();
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{8, 8}, {8, 8, 8}, {8, 5}, {5, 8}, {5, 5}}) {
    for (const auto& [from, to] : {std::pair(S0, S1), std::pair(S1, S0)}) {
      CAPTURE(shape);
      const at::Tensor whole = sample(shape);
      const at::Tensor source = distribute_tensor(whole, mesh, {from}, kNoSource);
      const CommCounter counter(mesh);
      const at::Tensor moved = redistribute(source, {to});
      CHECK(only(counter, "all_to_all", 1));
      CHECK(same(to_local(moved), to_local(distribute_tensor(whole, mesh, {to}, kNoSource))));
    }
  }
}

TESSERA_RANKS_TEST_CASE("10: changes of two mesh dimensions take at most the collectives of PyTorch's planner", {4}) {
  const DeviceMesh mesh = mesh_over({2, 2});
  struct Row {
    std::vector<int64_t> shape;
    Placements from;
    Placements to;
    int64_t most;
  };
  const std::vector<Row> rows = {
      {{8, 8}, {S0, S1}, {S0, S0}, 1},    {{8, 8}, {S0, S1}, {S1, S0}, 2},    {{8, 8}, {S0, S0}, {S1, S1}, 2},
      {{8, 8, 8}, {S0, S2}, {S1, S0}, 2}, {{8, 8, 8}, {S1, S1}, {S1, S2}, 1},
  };
  for (const Row& row : rows) {
    CAPTURE(to_string(row.from));
    CAPTURE(to_string(row.to));
    const at::Tensor whole = sample(row.shape);
    const at::Tensor source = distribute_tensor(whole, mesh, row.from, kNoSource);
    const CommCounter counter(mesh);
    const at::Tensor moved = redistribute(source, row.to);
    CHECK(counter.total() <= row.most);
    CHECK(same(to_local(moved), piece_of(whole, mesh, row.to)));
  }
}

TESSERA_RANKS_TEST_CASE("11: changes of three mesh dimensions, likewise", {8}) {
  const DeviceMesh mesh = mesh_over({2, 2, 2});
  struct Row {
    Placements from;
    Placements to;
    int64_t most;
  };
  const std::vector<Row> rows = {
      {{S0, S0, S0}, {S1, S1, S1}, 3},
      {{S0, S1, S2}, {S2, S1, S0}, 2},
      {{S1, S0, S0}, {R, S0, S0}, 1},
      {{S0, S0, S1}, {S0, S1, S2}, 2},
  };
  const at::Tensor whole = sample({8, 8, 8});
  for (const Row& row : rows) {
    CAPTURE(to_string(row.from));
    CAPTURE(to_string(row.to));
    const at::Tensor source = distribute_tensor(whole, mesh, row.from, kNoSource);
    const CommCounter counter(mesh);
    const at::Tensor moved = redistribute(source, row.to);
    CHECK(counter.total() <= row.most);
    CHECK(same(to_local(moved), piece_of(whole, mesh, row.to)));
  }
}

TESSERA_RANKS_TEST_CASE("12: pieces of any layout on a 4 x 2 mesh go to every other", {8}) {
  const DeviceMesh mesh = mesh_over({4, 2});
  const at::Tensor whole = sample({16, 24});
  for (const Placements& from : all_layouts(2, {R, S0, S1, P})) {
    double factor = 1;  // every rank passes the piece as its term
    for (std::size_t i = 0; i < 2; ++i)
      factor *= from[i].is_partial() ? static_cast<double>(mesh.mesh().shape()[i]) : 1.0;
    const at::Tensor source =
        from_local(piece_of(whole, mesh, from), mesh, from, {.shape = std::vector<int64_t>{16, 24}});
    for (const Placements& to : all_layouts(2, {R, S0, S1})) {
      CAPTURE(to_string(from));
      CAPTURE(to_string(to));
      CHECK(close(full_tensor(redistribute(source, to)), whole * factor));
    }
  }
}

TESSERA_RANKS_TEST_CASE("13: on a mesh dimension of size 1 placements change without communication", {4}) {
  const DeviceMesh mesh = mesh_over({4, 1});
  const at::Tensor whole = sample({8, 6});
  for (const Placement& from : {S1, R, P}) {
    for (const Placement& to : {S0, S1, R}) {
      const at::Tensor source =
          from_local(piece_of(whole, mesh, {S0, from}), mesh, {S0, from}, {.shape = whole.sizes().vec()});
      const CommCounter counter(mesh);
      const at::Tensor moved = redistribute(source, {S0, to});
      CHECK(counter.total() == 0);
      CHECK(placements_of(moved) == Placements{S0, to});
      CHECK(same(to_local(moved), piece_of(whole, mesh, {S0, R})));
    }
  }
}

TESSERA_RANKS_TEST_CASE("20: distribute_tensor is one scatter; from any source, or from none", {4}) {
  const DeviceMesh mesh = line();
  const int64_t me = mesh.local_rank(0);
  const at::Tensor mine = sample({12, 3}, me);
  CommCounter counter(mesh);
  const at::Tensor first = distribute_tensor(mine, mesh, {S0});
  CHECK(only(counter, "scatter", 1));
  CHECK(same(to_local(first), piece_of(sample({12, 3}, 0), mesh, {S0})));
  counter.reset();
  CHECK(same(to_local(distribute_tensor(mine, mesh, {R})), sample({12, 3}, 0)));
  CHECK(only(counter, "broadcast", 1));
  CHECK(same(to_local(distribute_tensor(mine, mesh, {S0}, 1)), piece_of(sample({12, 3}, 1), mesh, {S0})));
  counter.reset();
  CHECK(same(to_local(distribute_tensor(mine, mesh, {S0}, kNoSource)), piece_of(mine, mesh, {S0})));
  CHECK(counter.total() == 0);
  CHECK(distribute_tensor(first, mesh, {S0}).is_same(first));
  CHECK(counter.total() == 0);
  // The gradient is the whole, plain one.
  at::Tensor x = sample({12, 3});
  x.requires_grad_(true);
  (full_tensor(distribute_tensor(x * 2, mesh, {S0})) * sample({12, 3}, 1)).sum().backward();
  CHECK_FALSE(is_dtensor(x.grad()));
  CHECK(same(x.grad(), sample({12, 3}, 1) * 2));
}

TESSERA_RANKS_TEST_CASE("a tensor distributed in place is a DTensor for everyone who holds it", {1, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = sample({5, 3});
  at::Tensor parameter = (whole + static_cast<double>(mesh.local_rank(0))).requires_grad_(true);
  const at::Tensor other_handle = parameter;
  (parameter * 2).sum().backward();
  distribute_in_place(parameter, mesh, {S0});
  CHECK(is_dtensor(other_handle));
  CHECK(other_handle.requires_grad());
  CHECK(other_handle.is_leaf());
  CHECK(same(full_tensor(other_handle.detach()), whole));
  CHECK(placements_of(other_handle.grad()) == Placements{S0});
  (other_handle * 3).sum().backward();
  CHECK(same(full_tensor(parameter.grad()), at::ones({5, 3}, on(at::kDouble)) * 5));
  parameter.mutable_grad().reset();
  at::Tensor term = whole.clone();
  distribute_in_place(term, mesh, {P}, kNoSource);
  CHECK(same(full_tensor(term), whole));
}

TESSERA_RANKS_TEST_CASE("21: from_local infers the global geometry of even pieces", {1, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size();
  const at::Tensor rows = from_local(at::ones({3, 3}, on(at::kFloat)), mesh, {S0});
  CHECK(rows.sizes() == at::IntArrayRef({3 * n, 3}));
  CHECK(rows.strides() == at::IntArrayRef({3, 1}));
  const at::Tensor columns = from_local(at::ones({3, 3}, on(at::kFloat)), mesh, {S1});
  CHECK(columns.sizes() == at::IntArrayRef({3, 3 * n}));
  CHECK(columns.strides() == at::IntArrayRef({3 * n, 1}));
  // The DTensor is row-major whatever the piece's strides, so that ranks agree; and its views are right.
  const at::Tensor turned = from_local(at::ones({8, 4, 8}, on(at::kFloat)).permute({0, 2, 1}), mesh, {S0});
  CHECK(turned.sizes() == at::IntArrayRef({8 * n, 8, 4}));
  CHECK(turned.strides() == at::IntArrayRef({32, 4, 1}));
  const at::Tensor counted = at::arange(6, on(at::kDouble)).view({2, 3}).t();
  CHECK(at::equal(full_tensor(from_local(counted, mesh, {R}).view({-1})), counted.reshape({-1})));
  CHECK(from_local(at::ones({3, 3}, on(at::kFloat)), mesh, {R}).sizes() == at::IntArrayRef({3, 3}));
  // Given strides are used.
  FromLocalOptions options;
  options.shape = std::vector<int64_t>{3 * n, 3};
  options.stride = std::vector<int64_t>{1, 3 * n};
  CHECK(from_local(at::ones({3, 3}, on(at::kFloat)), mesh, {S0}, options).strides() == at::IntArrayRef({1, 3 * n}));
  // A piece whose rows lie one after another is copied under strides of columns, and one with gaps is not.
  const at::Tensor by_row = at::arange(6, on(at::kDouble)).view({2, 3});
  const at::Tensor by_column =
      from_local(by_row, mesh, {R}, {.shape = std::vector<int64_t>{2, 3}, .stride = std::vector<int64_t>{1, 2}});
  CHECK(to_local(by_column).strides() == at::IntArrayRef({1, 2}));
  CHECK(at::equal(to_local(by_column), by_row));
  CHECK(at::equal(full_tensor(by_column.t().contiguous().view({-1})), by_row.t().reshape({-1})));
  const at::Tensor gaps = by_row.slice(1, 0, 2);
  CHECK(
      to_local(from_local(gaps, mesh, {R}, {.shape = std::vector<int64_t>{2, 2}, .stride = std::vector<int64_t>{2, 1}}))
          .is_alias_of(by_row));
  CHECK_THROWS_WITH_AS(from_local(at::ones({3, 3}, on(at::kFloat)), mesh, {S0}, {.stride = std::vector<int64_t>{3, 1}}),
                       doctest::Contains("stride without shape"), std::invalid_argument);
  CHECK_NOTHROW(from_local(piece_of(at::ones({13, 3}, on(at::kFloat)), mesh, {S0}), mesh, {S0},
                           {.shape = std::vector<int64_t>{13, 3}, .check = true}));
}

TESSERA_RANKS_TEST_CASE("21b: from_local infers it where one of two cuts has a fixed size", {4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2}, {"a", "b"}, world());
  const at::Tensor piece = at::ones({2, 3}, on(at::kFloat));
  const std::vector<Placements> cuts = {{RaggedShard(0, {4, 4}), Shard(0)},
                                        {Shard(0), RaggedShard(0, {2, 2})},
                                        {Shard(0).ordered(1), RaggedShard(0, {4, 4})},
                                        {Shard(0), Shard(0)}};
  for (const Placements& placements : cuts) {
    CAPTURE(to_string(placements));
    CHECK(from_local(piece, mesh, placements).sizes() == at::IntArrayRef({8, 3}));
  }
}

TESSERA_RANKS_TEST_CASE("the DTensor view says and does what the functions do", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = sample({5, 3});
  const DTensor t(spread(whole, mesh, {S0}));
  CHECK(t.mesh() == mesh);
  CHECK(t.placements() == Placements{S0});
  CHECK(same(t.to_local(), piece_of(whole, mesh, {S0})));
  CHECK(t.redistribute({S1}).placements() == Placements{S1});
  CHECK(same(t.full_tensor(), whole));
  const at::Tensor& plain = t;
  CHECK(same(full_tensor(plain + t.tensor()), whole + whole));
  CHECK(to_string(t) == "DTensor Double [5, 3] on {d0: 2} on " + device_name() + " as [S(0)], here [" +
                            std::to_string(3 - mesh.local_rank(0)) + ", 3]");
}

TESSERA_RANKS_TEST_CASE("any order of ranks on a mesh gives the same value", {3}) {
  const DeviceMesh mesh(world(), device().type(), Mesh({3}, {"tp"}, {2, 0, 1}));
  const at::Tensor whole = sample({7, 4});
  const at::Tensor t = distribute_tensor(whole, mesh, {S0});
  CHECK(same(to_local(t), piece_of(whole, mesh, {S0})));
  for (const Placement& to : {S1, R, P}) CHECK(same(full_tensor(redistribute(t, {to})), whole));
  CHECK(close(full_tensor(at::matmul(t.t(), t)), at::matmul(whole.t(), whole)));
}
