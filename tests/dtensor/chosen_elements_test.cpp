// Tests operators that read or write elements by their indices, and that choose elements by their values, where the
// dimension along which they do so is cut.

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/TensorIndexing.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

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
using at::indexing::Slice;

namespace {

at::Tensor ints(const std::vector<int64_t>& values, at::IntArrayRef sizes) {
  return at::tensor(values, at::kLong).view(sizes);
}

// Replicated indices, and tensors cut in every way.
const std::vector<Placements> kCut = {{R, S0, S1, BlockCyclic(1, 2), P}, {R}};

OpCase reading(const std::string& name, const at::Tensor& x, const at::Tensor& index,
               const std::function<Tensors(const at::Tensor& x, const at::Tensor& index)>& op) {
  return op_case(
      name, {x, index}, [op](const Tensors& t) { return op(t[0], t[1]); }, kCut);
}

OpCase writing(
    const std::string& name, const at::Tensor& index, const at::Tensor& values,
    const std::function<Tensors(const at::Tensor& x, const at::Tensor& index, const at::Tensor& values)>& op) {
  return op_case(name, {sample({7, 9}), index, values}, [op](const Tensors& t) { return op(t[0], t[1], t[2]); },
                 {kCut[0], {R, S0}, {R, S0, P}});
}

}  // namespace

TESSERA_RANKS_TEST_CASE("elements that indices name, of every layout", {1, 2, 3, 4}) {
  const at::Tensor x = sample({7, 9}), one = ints({3, 0, 8, 2, 8, 5, 1}, {7, 1}), two = ints({0, 8, 3, 3}, {2, 2});
  const at::Tensor rows = ints({6, 0, 6}, {3}), columns = ints({8, 0, 4, 4}, {2, 2});
  check_ops(
      {
          reading("gather along lines", x, one,
                  [](const auto& t, const auto& i) {
                    return Tensors{t.gather(1, i), t.gather(-1, i) * t};
                  }),
          reading("gather of some lines", x, two, [](const auto& t, const auto& i) { return Tensors{t.gather(1, i)}; }),
          reading("gather along the first dimension", x, ints({6, 1, 1, 0, 5, 3, 2, 2, 6}, {1, 9}),
                  [](const auto& t, const auto& i) {
                    return Tensors{t.gather(0, i), t.take_along_dim(i, 0)};
                  }),
          reading("index_select", x, rows,
                  [](const auto& t, const auto& i) {
                    return Tensors{t.index_select(0, i), t.index_select(1, i.to(at::kInt)), t.index_select(-1, i[1])};
                  }),
          reading("one index", x, rows,
                  [](const auto& t, const auto& i) {
                    return Tensors{t.index({i}), t.index({Slice(), i}), t.index({i - 7}), t.index({Slice(), -i - 1})};
                  }),
          reading("two indices", x, columns,
                  [](const auto& t, const auto& i) {
                    return Tensors{t.index({i.clamp_max(6), i}), t.index({i.clamp_max(6)[0], i.to(at::kInt) - 9})};
                  }),
          reading("indices apart", sample({7, 9, 4}), rows,
                  [](const auto& t, const auto& i) {
                    return Tensors{t.index({i, Slice(), i.clamp_max(3)}),
                                   t.index({Slice(), i, (i.unsqueeze(1) + i).remainder(8) - 4})};
                  }),
          reading("no index", x, ints({}, {0}), [](const auto& t, const auto& i) { return Tensors{t.index({i})}; }),
      },
      24);
}

TESSERA_RANKS_TEST_CASE("elements of bools, integers and narrow numbers that indices name", {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor index = ints({8, 0, 4}, {3, 1});
  for (const at::ScalarType type : {at::kBool, at::kByte, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat}) {
    CAPTURE(std::string(toString(type)));
    const at::Tensor whole = (sample({3, 9}) * 5).abs().to(type);
    const at::Tensor x = spread(whole, mesh, {S1}), i = spread(index, mesh, {R});
    CHECK(at::equal(full_tensor(x.gather(1, i)), whole.gather(1, index)));
    CHECK(at::equal(full_tensor(x.index({Slice(), i[1]})), whole.index({Slice(), index[1]})));
    CHECK(at::equal(full_tensor(x.scatter(1, i, 1)), whole.scatter(1, index, 1)));
    CHECK(at::equal(full_tensor(x.scatter_add(1, i, x.gather(1, i))),
                    whole.scatter_add(1, index, whole.gather(1, index))));
  }
  const at::Tensor complex = at::complex(sample({3, 9}), sample({3, 9}, 1));
  const at::Tensor got = full_tensor(spread(complex, mesh, {S1}).gather(1, spread(index, mesh, {R})));
  CHECK(at::equal(at::view_as_real(got), at::view_as_real(complex.gather(1, index))));
}

TESSERA_RANKS_TEST_CASE("elements written by their indices, of every layout", {1, 2, 3, 4}) {
  const at::Tensor places = ints({3, 0, 8, 2, 8, 5, 1, 1, 7, 0, 3, 3, 2, 6}, {7, 2}), wide = sample({7, 2}, 1);
  const at::Tensor rows = ints({6, 0, 3}, {3}), of_rows = sample({3, 9}, 1);
  check_ops(
      {
          writing("scatter_add", places, wide,
                  [](const auto& t, const auto& i, const auto& v) {
                    return Tensors{t.scatter_add(1, i, v), (t * 1).scatter_add_(1, i, v)};
                  }),
          writing("scatter", ints({3, 0, 8, 2, 8, 5, 1, 4, 7, 1, 3, 0, 2, 6}, {7, 2}), wide,
                  [](const auto& t, const auto& i, const auto& v) {
                    return Tensors{t.scatter(1, i, v),
                                   t.scatter(1, i, 2.5),
                                   (t * 1).scatter_(1, i, v),
                                   t.detach().scatter(1, i, v.detach(), "multiply"),
                                   t.scatter_reduce(1, i, v, "sum"),
                                   t.detach().scatter_add(1, i, at::cat({v, v}, 1).detach())};
                  }),
          writing("scatter_reduce", places, wide,
                  [](const auto& t, const auto& i, const auto& v) {
                    return Tensors{t.scatter_reduce(1, i, v, "amax"), t.scatter_reduce(1, i, v, "mean", false),
                                   t.scatter_reduce(1, i, v, "prod")};
                  }),
          writing(
              "index_add", rows, of_rows,
              [](const auto& t, const auto& i, const auto& v) {
                return Tensors{t.index_add(0, i, v, 2), (t * 1).index_add_(1, i, v.index({Slice(), Slice(0, 7)}).t())};
              }),
          writing("index_copy", rows, of_rows,
                  [](const auto& t, const auto& i, const auto& v) {
                    return Tensors{t.index_copy(0, i, v), (t * 1).index_copy_(0, i, v), t.index_fill(1, i, 2.5),
                                   (t * 1).index_fill_(0, i, v.sum())};
                  }),
          writing("index_put", rows, of_rows,
                  [](const auto& t, const auto& i, const auto& v) {
                    return Tensors{t.index_put({i}, v), t.index_put({i - 7}, v, true),
                                   (t * 1).index_put_({i, i + 2}, v[0][0]),
                                   (t * 1).index_put_({std::nullopt, i}, v.sum(0).slice(0, 0, 3), true)};
                  }),
      },
      24);
}

TESSERA_RANKS_TEST_CASE("the greatest and smallest elements of every layout", {1, 2, 3, 4}) {
  const auto of = [](const at::Tensor& t) {
    const auto [top, index] = t.topk(3, -1);
    const auto [low, of_low] = t.topk(2, 0, /*largest=*/false);
    const auto [first, of_first] = t.max(-1);
    const auto [third, of_third] = t.kthvalue(3, 0, /*keepdim=*/true);
    return Tensors{top,
                   index,
                   low,
                   of_low,
                   first,
                   of_first,
                   third,
                   of_third,
                   std::get<0>(t.sort(-1, true)),
                   std::get<0>(t.cummax(0)),
                   std::get<0>(t.median(0)),
                   std::get<0>(t.min(0, true)) * t};
  };
  check_ops(
      {
          op_case("a matrix", {sample({7, 11})}, [of](const Tensors& t) { return of(t[0]); },
                  {{R, S0, S1, BlockCyclic(1, 2), P}}),
          op_case("three dimensions", {sample({7, 2, 5})}, [of](const Tensors& t) { return of(t[0]); }),
          op_case("transposed", {sample({11, 7}).t()}, [of](const Tensors& t) { return of(t[0]); }),
          op_case("a line", {sample({13})},
                  [](const Tensors& t) {
                    return Tensors{std::get<0>(t[0].topk(13)), std::get<1>(t[0].topk(1)), std::get<0>(t[0].topk(0))};
                  }),
      },
      24);
}

TESSERA_RANKS_TEST_CASE("topk of pieces that are uneven or empty, with infinities and NaN", {2, 3, 4}) {
  const DeviceMesh mesh = line();
  std::vector<int64_t> sizes(static_cast<std::size_t>(mesh.size()), 0);
  sizes.front() = 2;
  sizes.back() = 6;
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<at::Tensor> lines = {
      at::tensor({-infinity, 1.0, -infinity, -infinity, -infinity, -infinity, -infinity, -infinity}),
      at::tensor({nan, nan, infinity, infinity, nan, nan, nan, infinity}),
      at::tensor({nan, 1.0, -infinity, 2.0, infinity, nan, 3.0, -2.0}),
      at::tensor({255, 0, 0, 255, 0, 0, 7, 0}, at::kByte),
      at::tensor({INT64_MAX, INT64_MIN, INT64_MIN, INT64_MAX, INT64_MIN, int64_t{0}, INT64_MAX, INT64_MIN}),
  };
  for (const at::Tensor& whole : lines) {
    for (const Placement& cut : {S0, Placement(RaggedShard(0, sizes)), Placement(BlockCyclic(0, 1))}) {
      for (const bool largest : {false, true}) {
        for (const int64_t k : {1, 3, 8}) {
          const auto [values, indices] = spread(whole, mesh, {cut}).topk(k, 0, largest);
          const at::Tensor value = full_tensor(values), index = full_tensor(indices);
          CHECK(at::allclose(value, std::get<0>(whole.topk(k, 0, largest)), 0, 0, /*equal_nan=*/true));
          CHECK(at::allclose(whole.index_select(0, index), value, 0, 0, /*equal_nan=*/true));
          CHECK(std::get<0>(at::_unique(index)).numel() == k);
        }
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("what indices and choices along a cut dimension communicate", {4}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = leaf(sample({6, 400}), mesh, {S1});
  const at::Tensor labels = spread(ints({0, 399, 5, 100, 300, 7}, {6}), mesh, {R});
  const auto counts = [&](const auto& call) { return collectives_of(mesh, call); };
  at::Tensor out;
  const auto back = [&] {
    const at::Tensor grad = spread(sample(out.sizes()), mesh, {R});
    return counts([&] { out.backward(grad); });
  };
  CHECK(counts([&] { out = x.gather(1, labels.unsqueeze(1)); }).empty());
  CHECK(placements_of(out) == Placements{P});
  CHECK(counts([&] { full_tensor(out); }) == "all_reduce 48 ");  // of 6 numbers
  CHECK(back().empty());
  CHECK(placements_of(x.grad()) == Placements{S1});
  CHECK(counts([&] { out = x.index({spread(at::arange(6), mesh, {R}), labels}); }).empty());
  CHECK(back().empty());
  CHECK(counts([&] { out = std::get<0>(x.topk(5, 1)); }) == "all_gather 240 all_gather 240 ");  // of 6 x 5 each
  CHECK(placements_of(out) == Placements{R});
  CHECK(back().empty());
  for (const auto& chosen : {x.max(1), x.min(1, true)}) {
    out = std::get<0>(chosen);
    CHECK(back().empty());
  }
  at::Tensor cache = spread(sample({2, 64, 3}), mesh, {S1});  // cut along positions
  const at::Tensor position = spread(ints({17}, {1}), mesh, {R}), written = spread(sample({2, 1, 3}, 1), mesh, {R});
  const Strict strict;
  cache.index_copy_(1, position, written);
  cache.index_put_({Slice(), position + 1}, written);
  cache.scatter_(1, position.view({1, 1, 1}), 1);
  x.detach().scatter_add_(1, labels.unsqueeze(1), spread(sample({6, 1}), mesh, {R}));
  CHECK(placements_of(cache) == Placements{S1});
}

TESSERA_RANKS_TEST_CASE("second derivatives of chosen elements", {2, 3}) {
  const auto second = [](const at::Tensor& x, const at::Tensor& index) {
    const at::Tensor y = x.gather(1, index).pow(3).sum() + std::get<0>(x.topk(2, 1)).pow(3).sum() +
                         x.index_select(0, index.flatten()).pow(3).sum() + x.index({index, index}).pow(3).sum();
    const at::Tensor first = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return torch::autograd::grad({(first * first).sum()}, {x})[0];
  };
  const at::Tensor whole = sample({4, 9}), index = ints({3, 0, 2, 3}, {4, 1});
  const at::Tensor want = second(leaf(whole), index);
  for (const Placement& cut : {R, S0, S1}) {
    CHECK(close(full_tensor(second(leaf(whole, line(), {cut}), spread(index, line(), {R}))), want, 1e-9));
  }
}

TESSERA_RANKS_TEST_CASE("an index outside the dimension is refused on every rank, and the job goes on", {2, 3, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = spread(sample({2, 9}), mesh, {S1});
  const auto index = [&](int64_t i, at::IntArrayRef sizes) { return spread(at::full(sizes, i, at::kLong), mesh, {R}); };
  CHECK_THROWS_WITH_AS(x.gather(1, index(9, {2, 1})), doctest::Contains("index 9 is outside dimension 1 [0, 9)"),
                       std::out_of_range);
  CHECK_THROWS_WITH_AS(x.gather(1, index(-1, {2, 1})), doctest::Contains("index -1 is outside"), std::out_of_range);
  CHECK_THROWS_WITH_AS(x.index_select(1, index(-1, {1})), doctest::Contains("index -1 is outside"), std::out_of_range);
  CHECK_THROWS_WITH_AS(x.index({Slice(), index(-10, {1})}),
                       doctest::Contains("index -10 is outside dimension 1 [-9, 9)"), std::out_of_range);
  CHECK_THROWS_WITH_AS(x.scatter(1, index(9, {2, 1}), 0), doctest::Contains("index 9 is outside"), std::out_of_range);
  CHECK_THROWS_WITH_AS(x.topk(10, 1), doctest::Contains("out of range"), std::exception);
  at::Tensor few = spread(sample({2, 1}), mesh, {S1});  // other ranks have nothing
  CHECK_THROWS_WITH_AS(few.index_fill_(1, index(5, {1}), 1), doctest::Contains("index 5 is outside"),
                       std::out_of_range);
  CHECK_THROWS_AS(few.index_put_({Slice(), index(0, {1})}, spread(sample({2, 1}).to(at::kFloat), mesh, {R})),
                  std::exception);
  CHECK_THROWS_AS(few.index_copy(1, index(0, {1}), spread(sample({2, 1}).to(at::kFloat), mesh, {R})), std::exception);
  CHECK(full_tensor(x).equal(sample({2, 9})));
}

TESSERA_RANKS_TEST_CASE("elements of tensors of all layouts in memory, and gradients of their pieces", {1, 2, 3}) {
  const at::Tensor x = sample({4, 9, 2});
  const at::Tensor rows = ints({3, 0, 3}, {3}), columns = ints({8, 0, 4}, {3});
  const auto both = [](const Tensors& t) {
    const at::Tensor u = t[0] * 1;
    return Tensors{u.transpose(0, 1).index({t[2]}), u.transpose(0, 2).index({Slice(), t[2], t[1]}),
                   u.transpose(0, 1).index_select(0, t[2]),
                   u.transpose(1, 2).gather(1, t[1].view({1, 1, 3}).remainder(2))};
  };
  check_ops({op_case("of transposed tensors", {x, rows, columns}, both, {{R, S0, S1, Shard(2), P}, {R}, {R}})});
  const at::Tensor leaf_x = leaf(sample({4, 9}), line(), {S1});
  leaf_x.t().index({spread(rows, line(), {R})}).sum().backward();
  CHECK(leaf_x.grad().reshape({-1}).size(0) == 36);
  const at::Tensor other = leaf(sample({4, 9}), line(), {S1});
  other.index_select(1, spread(at::empty({0}, at::kLong), line(), {R})).sum().backward();
  CHECK(full_tensor(other.grad()).equal(at::zeros({4, 9}, at::kDouble)));
  const at::Tensor none = other.index_select(1, spread(at::empty({0}, at::kLong), line(), {R}));
  const at::Tensor first = torch::autograd::grad({none.pow(2).sum()}, {other}, {}, true, /*create_graph=*/true)[0];
  CHECK(full_tensor(torch::autograd::grad({first.sum()}, {other})[0]).equal(at::zeros({4, 9}, at::kDouble)));
}

TESSERA_RANKS_TEST_CASE("zeros that stand for elements of other ranks change no number", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor at_7 = spread(ints({7}, {1}), mesh, {R}), ones = spread(at::ones({4, 1}, at::kDouble), mesh, {R});
  const double infinity = std::numeric_limits<double>::infinity();
  const at::Tensor scaled = full_tensor(spread(sample({4, 9}), mesh, {S1}).index_add(1, at_7, ones, infinity));
  CHECK(scaled.equal(sample({4, 9}).index_fill(1, ints({7}, {1}), infinity)));
  const at::Tensor negative = spread(at::zeros({4, 9}, at::kDouble).neg(), mesh, {S1});
  const at::Tensor added = full_tensor(negative.index_add(1, at_7, ones));
  CHECK(added.reciprocal().lt(0).sum().item<int64_t>() == 32);
  const at::Tensor nothing = spread(at::zeros({0, 3}, at::kLong), mesh, {R});
  CHECK(full_tensor(negative.scatter_add(1, nothing, spread(at::ones({0, 2}, at::kDouble), mesh, {R})))
            .sum()
            .item<double>() == 0);
}

TESSERA_RANKS_TEST_CASE("elements of every type, indices from the end, and many blocks", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor index = ints({7, 0}, {2}), here = spread(index, mesh, {R});
  for (const at::ScalarType type :
       {at::kUInt16, at::kUInt64, at::kFloat8_e4m3fn, at::kHalf, at::kInt, at::kBool, at::kComplexDouble}) {
    CAPTURE(std::string(c10::toString(type)));
    const at::Tensor whole = at::arange(36, at::kFloat).view({4, 9}).to(type);
    const at::Tensor x = spread(whole, mesh, {S1});
    const auto same = [](const at::Tensor& a, const at::Tensor& b) {
      return full_tensor(a).to(at::kComplexDouble).equal(b.to(at::kComplexDouble));
    };
    CHECK(same(x.index_select(1, here), whole.index_select(1, index)));
    CHECK(same(x.index({Slice(), here}), whole.index({Slice(), index})));
    if (c10::isBarebonesUnsignedType(type)) continue;  // LibTorch does not write these by indices
    const at::Tensor value = whole.narrow(1, 3, 1), values = spread(value, mesh, {R});
    CHECK(same(x.clone().index_put_({Slice(), here}, values), whole.clone().index_put_({Slice(), index}, value)));
  }
  const at::Tensor whole = sample({4, 120});
  const at::Tensor blocks = spread(whole, mesh, {BlockCyclic(1, 2)});
  CHECK(full_tensor(blocks.index_fill(1, here - 9, 5)).equal(whole.index_fill(1, index - 9, 5)));
  CHECK(full_tensor(blocks.index_select(1, here * 10)).equal(whole.index_select(1, index * 10)));
  CHECK(full_tensor(blocks.index_copy(1, here * 10, spread(sample({4, 2}, 1), mesh, {R})))
            .equal(whole.index_copy(1, index * 10, sample({4, 2}, 1))));
  const auto [want, order] = whole.topk(5, 1);
  const auto [values, places] = blocks.topk(5, 1);
  CHECK(full_tensor(values).equal(want));
  CHECK(full_tensor(places).equal(order));
}

TESSERA_RANKS_TEST_CASE("a partition over two mesh dimensions, and a gradient that is pending along one", {4}) {
  const DeviceMesh mesh = init_device_mesh(device_name(), {2, 2}, {"a", "b"}, world());
  const Placement ragged = RaggedShard(0, {2, 0, 0, 0});
  const at::Tensor x = leaf(sample({2, 3}), mesh, {ragged, ragged}), y = x * 1;
  y.narrow(0, 0, 1).mul_(2);
  const at::Tensor gradient = spread(at::ones({2, 3}, at::kDouble), mesh, {P, R});
  const at::Tensor got = torch::autograd::grad({y}, {x}, {gradient})[0];
  CHECK(full_tensor(got).equal(at::tensor({2., 2., 2., 1., 1., 1.}, at::kDouble).view({2, 3})));
}

TESSERA_RANKS_TEST_CASE("scatter_add of what is handled as one number, or as a bool, adds terms", {2, 3}) {
  const DeviceMesh mesh = line();
  const bool first = mesh.local_rank(0) == 0;
  const at::Tensor self =
      from_local(at::tensor({first ? 5.0 : 1.0, 2.0, 3.0}, at::kDouble), mesh, {Partial(ReduceOp::kMax)});
  const at::Tensor source =
      from_local(at::scalar_tensor(first ? 10.0 : 20.0, at::kDouble), mesh, {Partial(ReduceOp::kMax)});
  const at::Tensor place = spread(at::zeros({1}, at::kLong), mesh, {R});
  CHECK(full_tensor(self.scatter_add(0, place, source)).equal(at::tensor({25.0, 2.0, 3.0}, at::kDouble)));
}
