#include "tessera/dtensor/mappings.h"

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/core/mismatch.h"
#include "tessera/tests/dtensor/forward_level.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// A bool is no dimension, and a number does not say whether parts may be uneven.
template <class T>
constexpr bool cuts_by_bool = requires(const T& x, const DeviceMesh& mesh) {
  scatter_to_region(x, mesh, true);
};
template <class T>
constexpr bool takes_size_as_bool = requires(const T& x, const DeviceMesh& mesh, int64_t rows) {
  gather_from_sequence_region(x, mesh, rows);
};
static_assert(!cuts_by_bool<at::Tensor>);
static_assert(!takes_size_as_bool<at::Tensor>);

// Makes the tensors of all ranks: rank r has rows[r].
at::Tensor rows(int64_t n, at::IntArrayRef shape, int64_t seed) {
  std::vector<int64_t> sizes = {n};
  sizes.insert(sizes.end(), shape.begin(), shape.end());
  return sample(sizes, seed);
}

// Holds one region function, and what one process computes from all ranks' tensors and gradients of results.
struct Region {
  std::string name;
  std::vector<int64_t> shape;  // of x
  std::function<at::Tensor(const at::Tensor&, const DeviceMesh&)> run;
  std::function<at::Tensor(const at::Tensor& all, int64_t rank)> result;
  std::function<at::Tensor(const at::Tensor& grads, int64_t rank)> gradient;
  std::string forward, backward;  // the collective, or empty
};

at::Tensor part(const at::Tensor& t, int64_t n, int64_t rank, int64_t dim) { return t.chunk(n, dim)[rank]; }

// Concatenates the rows along `dim`.
at::Tensor joined(const at::Tensor& all, int64_t dim) { return at::cat(all.unbind(0), dim); }

std::vector<Region> regions(int64_t n) {
  const auto row = [](const at::Tensor& t, int64_t rank) { return t[rank]; };
  const auto sum = [](const at::Tensor& t, int64_t) { return t.sum(0); };
  const auto mean = [](const at::Tensor& t, int64_t) { return t.mean(0); };
  const auto part_of_row = [n](int64_t dim) {
    return [=](const at::Tensor& t, int64_t rank) { return part(t[rank], n, rank, dim); };
  };
  const auto part_of_sum = [n](int64_t dim) {
    return [=](const at::Tensor& t, int64_t rank) { return part(t.sum(0), n, rank, dim); };
  };
  const auto joined_along = [](int64_t dim) { return [=](const at::Tensor& t, int64_t) { return joined(t, dim); }; };
  return {
      {"copy", {4, 3}, [](auto& x, auto& m) { return copy_to_region(x, m); }, row, sum, "", "all_reduce"},
      {"copy, averaged",
       {4, 3},
       [](auto& x, auto& m) { return copy_to_region(x, m, ReduceOp::kAvg); },
       row,
       mean,
       "",
       "all_reduce"},
      {"reduce", {4, 3}, [](auto& x, auto& m) { return reduce_from_region(x, m); }, sum, row, "all_reduce", ""},
      {"reduce, averaged",
       {4, 3},
       [](auto& x, auto& m) { return reduce_from_region(x, m, ReduceOp::kAvg); },
       mean,
       [n](const at::Tensor& t, int64_t rank) { return t[rank] / n; },
       "all_reduce",
       ""},
      {"scatter last",
       {2, 3, 2 * n},
       [](auto& x, auto& m) { return scatter_to_region(x, m); },
       part_of_row(2),
       joined_along(2),
       "",
       "all_gather"},
      {"scatter 1",
       {2, 2 * n, 3},
       [](auto& x, auto& m) { return scatter_to_region(x, m, 1); },
       part_of_row(1),
       joined_along(1),
       "",
       "all_gather"},
      {"scatter sequence",
       {2 * n, 3},
       [](auto& x, auto& m) { return scatter_to_sequence_region(x, m); },
       part_of_row(0),
       joined_along(0),
       "",
       "all_gather"},
      {"gather last",
       {3, 2},
       [](auto& x, auto& m) { return gather_from_region(x, m); },
       joined_along(1),
       part_of_row(1),
       "all_gather",
       ""},
      {"gather 0",
       {3, 2},
       [](auto& x, auto& m) { return gather_from_region(x, m, {.tensor_dim = 0}); },
       joined_along(0),
       part_of_row(0),
       "all_gather",
       ""},
      {"gather last, pending",
       {3, 2},
       [](auto& x, auto& m) { return gather_from_region(x, m, {.pending_gradient = true}); },
       joined_along(1),
       part_of_sum(1),
       "all_gather",
       "reduce_scatter"},
      {"gather sequence",
       {3, 2},
       [](auto& x, auto& m) { return gather_from_sequence_region(x, m); },
       joined_along(0),
       part_of_sum(0),
       "all_gather",
       "reduce_scatter"},
      {"gather sequence, not parallel",
       {3, 2},
       [](auto& x, auto& m) { return gather_from_sequence_region(x, m, false); },
       joined_along(0),
       part_of_row(0),
       "all_gather",
       ""},
      {"reduce-scatter sequence",
       {2 * n, 3},
       [](auto& x, auto& m) { return reduce_scatter_to_sequence_region(x, m); },
       part_of_sum(0),
       joined_along(0),
       "reduce_scatter",
       "all_gather"},
      {"reduce-scatter last",
       {3, 2 * n},
       [](auto& x, auto& m) { return reduce_scatter_to_region(x, m, -1); },
       part_of_sum(1),
       joined_along(1),
       "reduce_scatter",
       "all_gather"},
  };
}

void check_collectives(const CommCounter& counter, const std::string& kind, const DeviceMesh& mesh) {
  CAPTURE(counter.to_string());
  CHECK(counter.total() == (kind.empty() || mesh.size() == 1 ? 0 : 1));
  if (!kind.empty() && mesh.size() > 1) CHECK(counter.count(kind) == 1);
}

// `laid` gives `x` its strides.
void check_region(const Region& region, const DeviceMesh& mesh,
                  const std::function<at::Tensor(const at::Tensor&)>& laid) {
  CAPTURE(region.name);
  // Each rank has rows of its own, also where a region takes them as equal, so that no rank's rows can be mistaken for
  // another's.
  const Checked not_compared(mesh, /*enabled=*/false);
  const int64_t n = mesh.size(), me = mesh.local_rank(0);
  const at::Tensor all = rows(n, region.shape, 1);
  const at::Tensor x = laid(all[me]).requires_grad_();
  const at::Tensor before = x.detach().clone();
  CommCounter counter(mesh);
  const at::Tensor y = region.run(x, mesh);
  check_collectives(counter, region.forward, mesh);
  CHECK(close(y.detach(), region.result(all, me)));
  CHECK(y.is_contiguous());
  const at::Tensor grads = rows(n, y.sizes(), 2);
  counter.reset();
  const at::Tensor gradient = torch::autograd::grad({y}, {x}, {grads[me]})[0];
  check_collectives(counter, region.backward, mesh);
  CHECK(close(gradient, region.gradient(grads, me)));
  CHECK(same(x.detach(), before));
}

at::Tensor transposed(const at::Tensor& t) { return t.transpose(0, -1).contiguous().transpose(0, -1); }

}  // namespace

TESSERA_RANKS_TEST_CASE("regions give what one process computes, forward and backward, with the collectives they say",
                        {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  for (const Region& region : regions(mesh.size())) {
    check_region(region, mesh, [](const at::Tensor& t) { return t.clone(); });
    check_region(region, mesh, transposed);
  }
}

TESSERA_RANKS_TEST_CASE("a gather of dimension 0 or of other dtypes, and ranks numbered in tensors, are exact", {4}) {
  const DeviceMesh mesh = line();
  const int64_t me = mesh.local_rank(0);
  const at::Tensor ones = at::ones({8, 4}, on(at::kFloat)) * me;
  CHECK(at::equal(reduce_from_region(ones, mesh), at::full({8, 4}, 6.F, on(at::kFloat))));
  CHECK(at::equal(gather_from_region(at::full({4}, me, on(at::kLong)), mesh),
                  at::tensor({0, 1, 2, 3}, on(at::kLong)).repeat_interleave(4)));
  const at::Tensor columns = at::arange(4, on(at::kLong)).expand({8, 4});
  CHECK(at::equal(scatter_to_region(columns, mesh), at::full({8, 1}, me, on(at::kLong))));
  const at::Tensor by_row = at::arange(4, on(at::kFloat)).view({4, 1}).expand({4, 4});
  CHECK(at::equal(reduce_scatter_to_sequence_region(by_row, mesh), at::full({1, 4}, 4.F * me, on(at::kFloat))));
  CHECK(at::equal(scatter_to_sequence_region(at::arange(8, on(at::kLong)), mesh),
                  at::arange(2 * me, 2 * me + 2, on(at::kLong))));
}

TESSERA_RANKS_TEST_CASE("experts: the same over two mesh dimensions as one", {4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2}, {"ep", "tp"}, world());
  const DeviceMesh both = mesh.merged({0, 1});
  for (const Region& region : regions(4)) check_region(region, both, [](const at::Tensor& t) { return t.clone(); });
}

TESSERA_RANKS_TEST_CASE("dropped_remainders: uneven parts are refused, or whole, and nothing is lost", {2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size(), me = mesh.local_rank(0);
  const at::Tensor x = sample({2 * n + 1, 3});
  CHECK_THROWS_WITH_AS(scatter_to_region(x, mesh, 0), doctest::Contains("is not divisible by the"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(scatter_to_sequence_region(x, mesh), doctest::Contains("dimension 0 of ["),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(reduce_scatter_to_sequence_region(x, mesh), doctest::Contains("allow_uneven"),
                       std::invalid_argument);
  at::Tensor leaf = x.clone().requires_grad_();
  const at::Tensor mine = scatter_to_sequence_region(leaf, mesh, /*allow_uneven=*/true);
  const at::Tensor whole = gather_from_sequence_region(mine, mesh, false, 2 * n + 1);
  CHECK(same(whole.detach(), x));
  (whole * sample({2 * n + 1, 3}, 4)).sum().backward();
  CHECK(same(leaf.grad(), sample({2 * n + 1, 3}, 4)));
  const at::Tensor summed = reduce_scatter_to_sequence_region(x, mesh, /*allow_uneven=*/true);
  CHECK(close(summed, piece_of(x * n, mesh, {Shard(0)})));
  CHECK(same(gather_from_region(at::full({me == 0 ? 1 : 0}, 5, on(at::kLong)), mesh, {.size = 1}),
             at::full({1}, 5, on(at::kLong))));
}

TESSERA_RANKS_TEST_CASE("uneven parts, empty ones too, have the gradients that one process computes", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size(), me = mesh.local_rank(0);
  for (const int64_t size : std::vector<int64_t>{2 * n + 1, n + 1, 1}) {
    for (const int64_t dim : {0, 1}) {
      for (const bool sequence : {false, true}) {
        if (sequence && dim != 0) continue;
        CAPTURE(size);
        CAPTURE(dim);
        CAPTURE(sequence);
        const std::vector<int64_t> shape = dim == 0 ? std::vector<int64_t>{size, 3} : std::vector<int64_t>{3, size};
        const Placements cut = {Shard(dim)};
        const at::Tensor whole = sample(shape, 1), terms = rows(n, shape, 2), grads = rows(n, shape, 3);

        // Backward gathers the pieces of one gradient: it is that of every rank's term.
        const at::Tensor term = leaf(terms[me]);
        const at::Tensor summed = sequence ? reduce_scatter_to_sequence_region(term, mesh, /*allow_uneven=*/true)
                                           : reduce_scatter_to_region(term, mesh, dim, /*allow_uneven=*/true);
        CHECK(close(summed.detach(), piece_of(terms.sum(0), mesh, cut)));
        const at::Tensor of_term = torch::autograd::grad({summed}, {term}, {piece_of(whole, mesh, cut)})[0];
        CHECK(close(of_term, whole));

        // Backward adds the gradients of all ranks, each of which has a part of the sum.
        const at::Tensor mine = leaf(piece_of(whole, mesh, cut));
        const at::Tensor gathered =
            sequence ? gather_from_sequence_region(mine, mesh, /*tensor_parallel_output_grad=*/true, size)
                     : gather_from_region(mine, mesh, {.tensor_dim = dim, .pending_gradient = true, .size = size});
        CHECK(same(gathered.detach(), whole));
        const at::Tensor of_mine = torch::autograd::grad({gathered}, {mine}, {grads[me]})[0];
        CHECK(close(of_mine, piece_of(grads.sum(0), mesh, cut)));
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("arguments that regions cannot take are refused before any communication, on every rank alike",
                        {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({4, 2});
  const DeviceMesh plane = init_device_mesh(device_name(), {2, 1}, {"dp", "tp"}, world());
  CommCounter counter(mesh);
  CHECK_THROWS_WITH_AS(copy_to_region(x, plane), doctest::Contains("mesh[\"name\"]"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(gather_from_region(x, mesh, {.tensor_dim = 2}), doctest::Contains("it has dimensions -2 to 1"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(scatter_to_region(at::ones({}, on(at::kFloat)), mesh), doctest::Contains("dimension -1"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(reduce_from_region(from_local(x, mesh, {Shard(0)}), mesh),
                       doctest::Contains("call redistribute"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(reduce_from_region(at::Tensor(), mesh), doctest::Contains("undefined"), std::invalid_argument);
  CHECK(counter.total() == 0);
}

TESSERA_RANKS_TEST_CASE("a product of complex numbers has the gradient that one process computes", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size(), me = mesh.local_rank(0);
  at::Tensor all = at::complex(rows(n, {2, 3}, 1), rows(n, {2, 3}, 2));
  all[0][0][0] = 0;
  all = all.detach().requires_grad_();
  const at::Tensor grad = at::complex(sample({2, 3}, 3), sample({2, 3}, 4));
  const at::Tensor x = all.detach()[me].clone().requires_grad_();
  const at::Tensor y = reduce_from_region(x, mesh, ReduceOp::kProduct);
  at::Tensor product = all[0];
  for (int64_t i = 1; i < n; ++i) product = product * all[i];
  CHECK(at::allclose(y.detach(), product.detach()));
  CHECK(
      at::allclose(torch::autograd::grad({y}, {x}, {grad})[0], torch::autograd::grad({product}, {all}, {grad})[0][me]));
}

TESSERA_RANKS_TEST_CASE("writing a result that is a view of x in place is refused, and x stays as it was", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({2 * mesh.size(), 3}), leaf = x.clone().requires_grad_();
  at::Tensor inner = leaf * 1;
  at::Tensor copy = copy_to_region(inner, mesh);
  CHECK(copy.is_alias_of(inner));
  CHECK_THROWS_WITH(copy.relu_(), doctest::Contains("is a view and is being modified inplace"));
  CHECK(scatter_to_sequence_region(inner, mesh).is_alias_of(inner) == (mesh.size() == 1));
  CHECK(same(inner.detach(), x));
  (copy.clone().relu_() * 3).sum().backward();
  CHECK(close(leaf.grad(), (x > 0).to(x.scalar_type()) * 3 * mesh.size()));
}

TESSERA_RANKS_TEST_CASE("what would throw only in backward, or only on several ranks, throws at the call", {1, 2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = sample({4, 2});
  CHECK_THROWS_WITH_AS(copy_to_region(x, mesh, ReduceOp::kBitAnd), doctest::Contains("copy_to_region: gradient"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(copy_to_region(at::complex(x, x), mesh, ReduceOp::kMax),
                       doctest::Contains("copy_to_region: gradient: max of ComplexDouble is not defined"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(reduce_from_region(at::arange(4, on(at::kLong)), mesh, ReduceOp::kAvg),
                       doctest::Contains("reduce_from_region"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(reduce_from_region(at::complex(x, x), mesh, ReduceOp::kMax),
                       doctest::Contains("reduce_from_region: max of ComplexDouble is not defined"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(reduce_scatter_to_region(x > 0, mesh),
                       doctest::Contains("reduce_scatter_to_region: sum of Bool is not defined"),
                       std::invalid_argument);
  const at::Tensor ids = at::arange(4, on(at::kLong));
  CHECK(same(copy_to_region(ids, mesh, ReduceOp::kAvg), ids));
  if (mesh.size() == 1) {
    CHECK_THROWS_WITH_AS(gather_from_region(x, mesh, {.tensor_dim = 0, .size = 5}),
                         doctest::Contains("size 5 along dimension 0, but the only rank has [4, 2]"),
                         std::invalid_argument);
  }
}

TESSERA_RANKS_TEST_CASE("pieces of unequal sizes without their sum are found by Checked", {2}) {
  const DeviceMesh mesh = line();
  const Checked checked(mesh);
  const at::Tensor mine = at::ones({mesh.local_rank(0) == 0 ? 3 : 2, 2}, on(at::kFloat));
  CHECK_THROWS_WITH_AS(gather_from_region(mine, mesh, {.tensor_dim = 0}),
                       doctest::Contains("Checked: the ranks are about to issue different collectives"), MismatchError);
}

TESSERA_RANKS_TEST_CASE("derivatives in forward mode go where the tensors go", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size();
  const at::Tensor x = sample({2 * n, 3}), change = sample({2 * n, 3}, 1);
  const ForwardLevel level;
  const at::Tensor given = dual(x, change);
  CHECK(close(tangent_of(copy_to_region(given, mesh)), change));
  CHECK(close(tangent_of(reduce_from_region(given, mesh)), change * n));
  CHECK(close(tangent_of(scatter_to_region(given, mesh, 0)), piece_of(change, mesh, {Shard(0)})));
  CHECK(close(tangent_of(gather_from_region(scatter_to_region(given, mesh, 0), mesh, {.tensor_dim = 0})), change));
  CHECK(close(tangent_of(reduce_scatter_to_region(given, mesh, 0)), piece_of(change, mesh, {Shard(0)}) * n));
}
