// Tests pointwise operators and reductions on DTensors of many layouts against plain tensors.

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/op_check.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/ranks.h"

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
