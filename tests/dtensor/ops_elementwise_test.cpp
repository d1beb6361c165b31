// Tests pointwise operators and reductions on DTensors of many layouts against plain tensors, and when pending terms
// are reduced.

#include <array>
#include <functional>
#include <limits>
#include <string>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/op_check.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

TESSERA_RANKS_TEST_CASE("pointwise operators, pending reductions among their inputs", {1, 2, 3, 4}) {
  const at::Tensor a = sample({5, 3});
  const at::Tensor b = sample({5, 3}, 1);
  const at::Tensor positive = sample({5, 3}).abs() + 0.2;
  check_ops({
      op_case("add", {a, b}, [](const Tensors& x) { return x[0] + x[1]; }),
      op_case("add, scaled", {a, b}, [](const Tensors& x) { return at::add(x[0], x[1], 3); }),
      op_case("sub, rsub", {a, b}, [](const Tensors& x) { return (1 - x[0]) - x[1]; }),
      op_case("mul", {a, b}, [](const Tensors& x) { return x[0] * x[1]; }),
      op_case("square by itself", {a}, [](const Tensors& x) { return x[0] * x[0]; }),
      op_case("div", {a, positive}, [](const Tensors& x) { return x[0] / x[1]; }),
      op_case("broadcast add", {a, sample({3}, 2)}, [](const Tensors& x) { return x[0] + x[1]; }),
      op_case("broadcast both ways", {sample({5, 1}), sample({1, 3}, 2)},
              [](const Tensors& x) { return x[0] * x[1] + x[0]; }),
      op_case("broadcast of 0-d", {a, sample({}, 2)}, [](const Tensors& x) { return x[0] + x[1] * x[0]; }),
      op_case("numbers", {a},
              [](const Tensors& x) {
                return Tensors{x[0] + 2, x[0] + 0.5, x[0] * 2.5, x[0] * 2, x[0] / 2, 2 - x[0], x[0] + 3, x[0] * 3};
              }),
      op_case("numbers twice", {a}, [](const Tensors& x) { return (x[0] + 1) + (x[0] + 5); }),
      op_case("integers", {whole_numbers({5, 3}, at::kLong), whole_numbers({5, 3}, at::kLong, 2)},
              [](const Tensors& x) {
                return Tensors{x[0] + x[1], x[0] + 1, x[0] * x[1], x[0] / (x[1] + 1), x[0] * 2};
              }),
      op_case("integers and floats", {whole_numbers({5, 3}, at::kLong), a},
              [](const Tensors& x) { return x[0] * x[1] + x[0]; }),
      op_case("bytes", {whole_numbers({5, 3}, at::kByte), whole_numbers({5, 3}, at::kLong, 1)},
              [](const Tensors& x) {
                return Tensors{x[0] + x[1], x[0] * x[0]};
              }),
      op_case("comparisons", {a, b},
              [](const Tensors& x) {
                return Tensors{x[0] > x[1], x[0] == x[0], x[0] < 0, x[0].ne(x[1])};
              }),
      op_case("activations", {a},
              [](const Tensors& x) {
                return Tensors{at::relu(x[0]),     at::gelu(x[0]),    at::gelu(x[0], "tanh"), at::silu(x[0]),
                               at::tanh(x[0]),     at::sigmoid(x[0]), at::elu(x[0]),          at::leaky_relu(x[0]),
                               at::softplus(x[0]), at::hardtanh(x[0])};
              }),
      op_case("functions", {positive},
              [](const Tensors& x) {
                return Tensors{x[0].exp(),        x[0].log(),    x[0].sqrt(), x[0].rsqrt(), x[0].abs(),
                               x[0].neg(),        x[0].pow(3),   x[0].sin(),  x[0].cos(),   x[0].erf(),
                               x[0].reciprocal(), x[0].square(), x[0].log1p()};
              }),
      op_case("clamp", {a},
              [](const Tensors& x) {
                return Tensors{x[0].clamp(-0.5, 0.5), x[0].clamp_min(0), x[0].clamp_max(0)};
              }),
      op_case("where", {a, b}, [](const Tensors& x) { return at::where(x[0] > 0, x[0], x[1]); }),
      op_case("where of a number", {a}, [](const Tensors& x) { return at::where(x[0] > 0, x[0], 0.5); }),
      op_case("masked_fill", {a, whole_numbers({5, 3}, at::kBool)},
              [](const Tensors& x) {
                return Tensors{x[0].masked_fill(x[1], -3.0), x[0].masked_fill(x[1], 0)};
              }),
      op_case("masked_fill, broadcast", {a, whole_numbers({3}, at::kBool)},
              [](const Tensors& x) { return x[0].masked_fill(x[1], -1e9); }),
      op_case("maximum, minimum", {a, b},
              [](const Tensors& x) {
                return Tensors{at::maximum(x[0], x[1]), at::minimum(x[0], x[1])};
              }),
      op_case(
          "addcmul, addcdiv, lerp", {a, b, positive},
          [](const Tensors& x) {
            return Tensors{at::addcmul(x[0], x[1], x[2], 2), at::addcdiv(x[0], x[1], x[2]), at::lerp(x[0], x[1], 0.3)};
          }),
      op_case("dtype changes", {a},
              [](const Tensors& x) {
                return Tensors{x[0].to(at::kLong), x[0].to(at::kDouble) * 2, x[0].to(at::kBool)};
              }),
      op_case("likes", {a},
              [](const Tensors& x) {
                return Tensors{at::zeros_like(x[0]), at::ones_like(x[0]), at::full_like(x[0], 3),
                               x[0].new_zeros({4, 2}), x[0].new_ones({5, 3})};
              }),
      op_case("pow of tensors, atan2", {positive, b},
              [](const Tensors& x) { return x[0].pow(x[1]) + at::atan2(x[0], x[1]); }),
  });
}

TESSERA_RANKS_TEST_CASE(
    "other pending reductions stay pending where an operator commutes with them, and are reduced elsewhere",
    {2, 3, 4}) {
  const Placements extrema = {Replicate(), Partial(ReduceOp::kMax), Partial(ReduceOp::kMin), Shard(0)};
  const Placements means = {Replicate(), Partial(ReduceOp::kAvg), Partial(), Shard(1)};
  const Placements products = {Replicate(), Partial(ReduceOp::kProduct), Partial()};
  const at::Tensor a = sample({5, 3});
  const at::Tensor b = sample({5, 3}, 1);
  const auto arithmetic = [](const Tensors& x) {
    return Tensors{x[0] + x[1], x[0] * x[1], x[0] + 1, x[0] * 2, -x[0], x[0] / x[1], at::maximum(x[0], x[1])};
  };
  const auto movement = [](const Tensors& x) {
    return Tensors{x[0].t(),     x[0].clone(), at::cat({x[0], x[1]}), x[0].view({15}),  x[0].select(0, 1),
                   x[0].amax(0), x[0].sum(),   x[0].mean(1),          x[0].amin({0, 1})};
  };
  for (const Placements& kinds : {extrema, means, products}) {
    check_ops({op_case("arithmetic", {a, b}, arithmetic, {kinds, kinds}),
               op_case("movement", {a, b}, movement, {kinds, kinds})},
              12);
  }
}

TESSERA_RANKS_TEST_CASE("reductions, empty pieces among them", {1, 2, 3, 4}) {
  std::vector<OpCase> cases;
  for (const at::Tensor& input : {sample({5, 3, 2}), sample({2, 3, 2}), sample({1, 5, 3})}) {
    cases.push_back(op_case("sums and means", {input}, [](const Tensors& x) {
      return Tensors{x[0].sum(),  x[0].sum(0),  x[0].sum(at::IntArrayRef{0, 2}, true),
                     x[0].mean(), x[0].mean(1), x[0].mean(0, true)};
    }));
    cases.push_back(op_case("extrema", {input}, [](const Tensors& x) {
      return Tensors{x[0].max(), x[0].min(), x[0].amax(0), x[0].amin({0, 1}), x[0].amax(at::IntArrayRef{-1}, true)};
    }));
    cases.push_back(op_case("extrema with places", {input}, [](const Tensors& x) {
      const auto [values, indices] = x[0].max(0);
      const auto [low, where] = x[0].min(1, true);
      return Tensors{values, indices, low, where, x[0].argmax(), x[0].argmax(0), x[0].argmin(1)};
    }));
    cases.push_back(op_case("products and deviations", {input}, [](const Tensors& x) {
      return Tensors{x[0].prod(0), x[0].prod(), x[0].var(0, false), x[0].std(1, false, true), x[0].cumsum(0)};
    }));
    cases.push_back(op_case("norms", {input}, [](const Tensors& x) {
      return Tensors{x[0].norm(), at::linalg_vector_norm(x[0], 2), at::linalg_vector_norm(x[0], 1, at::IntArrayRef{0}),
                     at::linalg_vector_norm(x[0], std::numeric_limits<double>::infinity()),
                     at::linalg_vector_norm(x[0], 3, at::IntArrayRef{1}, true)};
    }));
    cases.push_back(op_case("any and all", {input}, [](const Tensors& x) {
      return Tensors{(x[0] > 0.5).any(), (x[0] > -2).all(), (x[0] > 0).any(0),
                     (x[0] > 0).all(1),  (x[0] > 0).sum(),  at::count_nonzero(x[0] > 0)};
    }));
    cases.push_back(op_case("sorted", {input}, [](const Tensors& x) {
      const auto [values, indices] = x[0].sort(0);
      const auto [top, places] = x[0].topk(1, 1);
      return Tensors{values, indices, top, places};
    }));
  }
  const at::Tensor integers = whole_numbers({5, 3}, at::kInt);
  cases.push_back(op_case("of integers", {integers}, [](const Tensors& x) {
    return Tensors{x[0].sum(), x[0].sum(0), x[0].max(), x[0].amin(0), x[0].prod(1), x[0].sum(0, false, at::kDouble),
                   x[0].any()};
  }));
  check_ops(cases, 6);
}

TESSERA_RANKS_TEST_CASE("terms are reduced before a zero or non-finite number would make each of them NaN", {2, 3}) {
  const DeviceMesh mesh = line();
  const double infinity = std::numeric_limits<double>::infinity();
  const at::Tensor x = at::tensor({3.0, 0.0, 0.0, -1.0}, on(at::kDouble));
  const at::Tensor terms = spread(x, mesh, {Partial()}), total = spread(x, mesh, {S0}).sum();
  CHECK(at::equal(full_tensor(total / 0), x.sum() / 0));
  CHECK(at::equal(full_tensor(total * infinity), x.sum() * infinity));
  const at::Tensor halves = full_tensor(terms * infinity);
  CHECK(halves[0].item<double>() == infinity);
  CHECK(halves[3].item<double>() == -infinity);
  CHECK(placements_of(terms * 2) == Placements{Partial()});
  CHECK(placements_of(terms / 2) == Placements{Partial()});
  CHECK(at::allclose(full_tensor(terms * 0), x * 0));
  const at::Tensor none = distribute_tensor(at::zeros({}, on(at::kDouble)), mesh, {R});
  CHECK(at::equal(full_tensor(total / none), x.sum() / 0));
  // A threshold and a fill multiply nothing.
  CHECK(placements_of(at::threshold_backward(terms, spread(x, mesh, {R}), 0)) == Placements{Partial()});
  // Terms of both signs are divided by the zeros of a tensor, and by a zero that is pending itself.
  const at::Tensor some = at::tensor({2.0, 0.0, 4.0, 0.0}, on(at::kDouble)), divisor = spread(some, mesh, {R});
  CHECK(close(full_tensor(terms / divisor), x / some));
  CHECK(close(full_tensor(at::addcdiv(terms, terms, divisor, 0.5)), at::addcdiv(x, x, some, 0.5)));
  CHECK(close(full_tensor(total / spread(at::zeros({}, on(at::kDouble)), mesh, {Partial()})), x.sum() / 0));
  const at::Tensor one = spread(at::ones({1}, on(at::kDouble)), mesh, {R});
  const bool is_read = device().is_cpu();
  CHECK(placements_of(terms / one)[0].is_partial() == is_read);
  CHECK(placements_of(at::addcdiv(terms, terms, one))[0].is_partial() == is_read);
  const at::Tensor inside = at::tensor({0.25, 1.0, 0.5, 0.0}, on(at::kDouble));
  CHECK(close(full_tensor(at::logit_backward(terms, spread(inside, mesh, {R}))), at::logit_backward(x, inside)));
}

TESSERA_RANKS_TEST_CASE("a norm over dimensions that are not cut is LibTorch's own of the pieces, also in half types",
                        {1, 2, 3}) {
  const DeviceMesh mesh = line();
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexDouble}) {
    CAPTURE(std::string(toString(dtype)));
    const at::Tensor whole = sample({7, 5, 9}).to(dtype);
    const auto check = [&](const std::function<at::Tensor(const at::Tensor&)>& norm, int64_t cut) {
      const at::Tensor x = spread(whole, mesh, {Shard(cut)});
      const CommCounter counter(mesh);
      const at::Tensor got = norm(x);
      CHECK(counter.total() == 0);
      CHECK(same(to_local(got), norm(to_local(x))));
      CHECK((full_tensor(got) - norm(whole)).abs().max().item<double>() <= (whole.itemsize() == 2 ? 0.1 : 1e-5));
    };
    for (const double order : {0.0, 1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      CAPTURE(order);
      check([&](const at::Tensor& x) { return at::linalg_vector_norm(x, order, at::IntArrayRef{-1}); }, 0);
      check([&](const at::Tensor& x) { return at::linalg_vector_norm(x, order, at::IntArrayRef{0, 2}, true); }, 1);
      check([&](const at::Tensor& x) { return x.norm(order, at::IntArrayRef{1}, true); }, 2);
    }
  }
}

TESSERA_RANKS_TEST_CASE("a plain number that differs from rank to rank does not decide what is communicated", {2, 3}) {
  const DeviceMesh mesh = line();
  const Checked not_compared(mesh, /*enabled=*/false);
  const at::Tensor terms = spread(sample({4}), mesh, {Partial()});
  const at::Tensor mine = at::scalar_tensor(mesh.local_rank(0), on(at::kDouble));
  const at::Tensor product = terms * mine;  // on the first rank by 0
  CHECK_FALSE(placements_of(product)[0].is_partial());
  CHECK(close(to_local(redistribute(product, {R})).isfinite(), at::ones({4}, on(at::kBool))));
}

TESSERA_RANKS_TEST_CASE("terms that are larger than float16 holds are reduced before they are converted to it",
                        {2, 3}) {
  const DeviceMesh mesh = line();
  const auto me = static_cast<std::size_t>(mesh.local_rank(0));
  const double term = std::array{1e5, -99'990.0, 0.0}.at(me);
  const at::Tensor want = at::full({4}, 10.0, on(at::kHalf));
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const at::Tensor terms = from_local(at::full({4}, term, on(dtype)), mesh, {P});
    CHECK(same(full_tensor(terms.to(at::kHalf)), want));
    CHECK(same(full_tensor(at::sum(terms, at::kHalf)), at::full({}, 40.0, on(at::kHalf))));
    CHECK(same(full_tensor(from_local(at::zeros({4}, on(at::kHalf)), mesh, {P}).copy_(terms)), want));
    // The range of bfloat16 is that of float32.
    CHECK((placements_of(terms.to(at::kBFloat16)) == Placements{P}) == (dtype == at::kFloat));
  }
  const at::Tensor largest = from_local(at::full({4}, 1e5, on(at::kFloat)), mesh, {Partial(ReduceOp::kMax)});
  CHECK(placements_of(largest.to(at::kHalf)) == Placements{Partial(ReduceOp::kMax)});
}

TESSERA_RANKS_TEST_CASE("terms are reduced in their own dtype before they are joined with terms of another one", {4}) {
  const DeviceMesh mesh = mesh_over({2, 2});
  const bool first = mesh.local_rank(1) == 0;
  const at::Tensor bytes = from_local(at::full({2, 3}, first ? 200 : 100, on(at::kByte)), mesh, {S0, P});
  const at::Tensor floats = from_local(at::full({2, 3}, first ? 1.5 : 2.0, on(at::kFloat)), mesh, {S0, P});
  CHECK(same(full_tensor(at::cat({bytes, floats}, 1)), at::cat({full_tensor(bytes), full_tensor(floats)}, 1)));
  CHECK(placements_of(at::cat({floats, floats}, 1)) == Placements{S0, P});
  at::Tensor out = spread(at::zeros({4, 6}, on(at::kInt)), mesh, {S0, P});
  at::cat_out(out, {bytes, bytes}, 1);
  CHECK(same(full_tensor(out), at::cat({full_tensor(bytes), full_tensor(bytes)}, 1).to(at::kInt)));
}

namespace {

// Returns numbers, and for each element of `t` one of two rows, on the mesh of `t` if it has one.
at::Tensor like(const at::Tensor& t, at::IntArrayRef sizes) {
  const at::Tensor plain = sample(sizes, 7);
  return is_dtensor(t) ? spread(plain, mesh_of(t), {R}) : plain;
}
at::Tensor rows(const at::Tensor& t) {
  const at::Tensor plain = at::arange(6, on(at::kLong)).remainder(2).unsqueeze(1).expand({6, 4}).contiguous();
  return is_dtensor(t) ? spread(plain, mesh_of(t), {R}) : plain;
}

}  // namespace

TESSERA_RANKS_TEST_CASE("what is compared with its extremum in backward is reduced once, in forward", {2, 3}) {
  const DeviceMesh mesh = line();
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  using Reduce = at::Tensor (*)(const at::Tensor&);
  constexpr Reduce kReductions[] = {
      [](const at::Tensor& t) { return at::amax(t, {0}); },
      [](const at::Tensor& t) { return at::amin(t, {1}, true); },
      [](const at::Tensor& t) { return t.max(); },
      [](const at::Tensor& t) { return t.min(); },
      [](const at::Tensor& t) { return t.norm(kInfinity); },
      [](const at::Tensor& t) { return at::linalg_vector_norm(t, -kInfinity, at::IntArrayRef{0}); },
      [](const at::Tensor& t) {
        return at::scatter_reduce(like(t, {2, 4}), 0, rows(t), t, "amax");
      },
      [](const at::Tensor& t) {
        return at::scatter_reduce(t, 0, rows(t), like(t, {6, 4}), "amin");
      },
      [](const at::Tensor& t) {
        return like(t, {2, 4}).scatter_reduce_(0, rows(t), t, "amax");
      },
      [](const at::Tensor& t) {
        return at::index_reduce(like(t, {2, 4}), 0, rows(t).select(1, 0), t, "amax");
      },
      [](const at::Tensor& t) {
        return like(t, {2, 4}).index_reduce_(0, rows(t).select(1, 0), t, "amin");
      }};
  constexpr int64_t kBytes = 6 * 4 * 8;
  for (std::size_t i = 0; i < std::size(kReductions); ++i) {
    CAPTURE(i);
    const at::Tensor plain = leaf(sample({6, 4})), x = leaf(sample({6, 4}), mesh, {P});
    kReductions[i](plain).square().sum().backward();
    CommCounter counter(mesh);
    const at::Tensor result = kReductions[i](x);
    CHECK(counter.bytes("all_reduce") + counter.bytes("reduce_scatter") >= kBytes);
    const at::Tensor loss = result.square().sum();
    counter.reset();
    loss.backward();
    CHECK(counter.bytes("all_reduce") + counter.bytes("reduce_scatter") < kBytes);
    CHECK(close(full_tensor(x.grad()), plain.grad()));
  }
  const at::Tensor x = leaf(sample({6, 4}), mesh, {P});
  // Cut along a dimension that stays, the result is not pending.
  CHECK(placements_of(at::amax(x.detach(), {0})) == Placements{S0});
  const Strict strict;
  CHECK_THROWS_WITH(x.max(), doctest::Contains("aten::max: would communicate on its own"));
}
