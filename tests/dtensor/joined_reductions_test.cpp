// Tests operators for which ranks join what they find in their pieces: indices of extrema, variances and deviations,
// softmax, logsumexp, and losses of classes.

#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dispatch/explain_op.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/tests/dtensor/op_check.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/placement/short_names.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Returns results of all overloads.
Tensors places_of_extrema(const at::Tensor& x) {
  const auto [max, max_at] = x.max(0);
  const auto [min, min_at] = x.min(1, /*keepdim=*/true);
  const auto [low, high] = at::aminmax(x.detach(), 0, /*keepdim=*/true);
  const auto [least, greatest] = at::aminmax(x.detach());  // it has no derivative
  return {x.argmax(),           x.argmin(), x.argmax(0), x.argmin(-1), x.argmax(1, true), max, max_at, min, min_at,
          at::argmax(x, {}, 1), low,        high,        least,        greatest};
}

Tensors deviations(const at::Tensor& x) {
  const auto [var, mean] = at::var_mean(x, 0);
  const auto [std, mean_of_rows] = at::std_mean(x, at::IntArrayRef({1}), /*correction=*/at::Scalar(0.5), true);
  const auto [all, mean_of_all] = at::std_mean(x);
  return {x.var(),
          x.std(),
          x.var(0),
          x.var(1, false),
          x.std(-1, true, true),
          x.var(at::IntArrayRef({0, 1}), 2),
          var,
          mean,
          std,
          mean_of_rows,
          all,
          mean_of_all,
          x.var(0) * 2};
}

Tensors softmaxes(const at::Tensor& x) {
  return {x.softmax(0),
          x.softmax(1),
          x.log_softmax(0),
          x.log_softmax(-1),
          x.logsumexp(0),
          x.logsumexp(1, true),
          x.logsumexp(at::IntArrayRef({0, 1})),
          at::_safe_softmax(x, 0)};
}

// Returns losses by each reduction, with and without weights, of scores [n, classes, ...].
Tensors losses(const at::Tensor& scores, const at::Tensor& target, const at::Tensor& weight) {
  const bool spatial = scores.dim() > 2;
  Tensors out;
  for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    for (const at::Tensor& of_class : {at::Tensor(), weight}) {
      out.push_back(spatial ? at::nll_loss2d(scores, target, of_class, reduction, /*ignore_index=*/2)
                            : at::nll_loss(scores, target, of_class, reduction, /*ignore_index=*/2));
    }
  }
  return out;
}

// Returns real parts beside imaginary ones, which are rounded like other numbers.
at::Tensor real_numbers(const at::Tensor& t) { return t.is_complex() ? at::view_as_real(t) : t; }

// Returns layouts in which pieces are no ranges of rows, are empty, or are cut by both mesh dimensions.
std::vector<Placements> uneven_layouts(const DeviceMesh& mesh, int64_t rows) {
  const Placement cyclic = BlockCyclic(0, 2);
  std::vector<int64_t> sizes(static_cast<std::size_t>(mesh.size(0)), 0);
  sizes.back() = rows;
  const Placement last = RaggedShard(0, sizes);
  if (mesh.ndim() == 1) return {{cyclic}, {last}, {S0}, {S1}};
  return {{cyclic, S0}, {S0, cyclic}, {last, S0}, {S0, S0}, {S1, cyclic}, {cyclic, S1}, {S0, P}, {P, last}};
}

}  // namespace

TESSERA_RANKS_TEST_CASE("extrema, their indices, variances and deviations", {1, 2, 3, 4}) {
  const at::Tensor ties = whole_numbers({67, 3});
  check_ops({
      op_case("of numbers", {sample({67, 3})}, [](const Tensors& x) { return places_of_extrema(x[0]); }),
      op_case("of equal numbers", {ties.detach()}, [](const Tensors& x) { return places_of_extrema(x[0].detach()); }),
      op_case("of integers", {ties.to(at::kLong)}, [](const Tensors& x) { return places_of_extrema(x[0]); }),
      op_case("deviations", {sample({67, 3})}, [](const Tensors& x) { return deviations(x[0]); }),
      op_case("deviations of one row", {sample({1, 4})},
              [](const Tensors& x) {
                return Tensors{x[0].var(), x[0].std(1), x[0].var(at::IntArrayRef({1}), 0)};
              }),
      op_case("of three dimensions", {sample({2, 35, 3})},
              [](const Tensors& x) {
                const auto [max, index] = x[0].max(1);
                return Tensors{max, index, x[0].argmin(), x[0].var(at::IntArrayRef({0, 2})), x[0].argmax(2)};
              }),
  });
}

TESSERA_RANKS_TEST_CASE("indices of extrema and deviations of pieces that are uneven, strided or empty", {1, 2, 3, 4}) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor plain = sample({67, 3});
  const at::Tensor ties = whole_numbers({67, 3});
  const at::Tensor infinite = at::full({67, 3}, -kInfinity, on(at::kDouble));
  at::Tensor with_nan = plain.clone();
  with_nan[5][1] = std::numeric_limits<double>::quiet_NaN();
  with_nan[2][1] = std::numeric_limits<double>::quiet_NaN();
  for (const DeviceMesh& mesh : meshes()) {
    for (const Placements& layout : uneven_layouts(mesh, 67)) {
      CAPTURE(to_string(layout));
      const bool pending = layout[0].is_partial() || layout.back().is_partial();
      for (const at::Tensor& values : {plain, ties, infinite, with_nan, ties.to(at::kByte), -ties.to(at::kLong)}) {
        if (pending && !values.is_same(plain)) continue;  // terms of a sum do not add up to these exactly
        const Tensors got = places_of_extrema(spread(values, mesh, layout));
        const Tensors want = places_of_extrema(values);
        for (std::size_t i = 0; i < want.size(); ++i) {
          CAPTURE(i);
          CHECK(close(full_tensor(got[i]), want[i]));
        }
      }
      for (const at::Tensor& values : {plain, at::complex(plain, plain.cos())}) {
        const Tensors got = deviations(spread(values, mesh, layout));
        const Tensors want = deviations(values);
        for (std::size_t i = 0; i < want.size(); ++i) {
          CAPTURE(i);
          CHECK(close(real_numbers(full_tensor(got[i])), real_numbers(want[i])));
        }
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("softmax, logsumexp and losses of classes", {1, 2, 3, 4}) {
  const at::Tensor target = at::tensor({0, 3, 2, 1, 3}, on(at::kLong));
  const at::Tensor weight = sample({4}, 3).abs();
  const Placements whole = {R};
  check_ops({
      op_case("softmax", {sample({67, 3})}, [](const Tensors& x) { return softmaxes(x[0]); }),
      op_case("softmax of three dimensions", {sample({2, 65, 3})},
              [](const Tensors& x) {
                return Tensors{x[0].softmax(1), x[0].log_softmax(2), x[0].logsumexp(at::IntArrayRef({0, 2}))};
              }),
      op_case("of a vector", {sample({70})},
              [](const Tensors& x) {
                return Tensors{x[0].softmax(0), x[0].logsumexp(0), at::nll_loss(x[0], x[0].argmax())};
              }),
      op_case("losses", {sample({5, 4}), target, weight},
              [](const Tensors& x) { return losses(x[0], x[1], x[2].detach()); }, {{R, S0, S1, P}, {R, S0}, whole}),
      op_case("losses of images", {sample({2, 4, 3, 2}), whole_numbers({2, 3, 2}, at::kLong).remainder(4), weight},
              [](const Tensors& x) { return losses(x[0], x[1], x[2].detach()); }, {{R, S0, S1, S2}, {R, S0}, whole}),
      op_case("losses of a logarithm of softmax", {sample({5, 4}), target},
              [](const Tensors& x) { return at::nll_loss(x[0].log_softmax(1), x[1]); }, {{R, S0, S1}, {R, S0}}),
  });
}

TESSERA_RANKS_TEST_CASE("softmax and losses of pieces that are uneven, strided or empty, and of infinities",
                        {1, 2, 3, 4}) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor plain = sample({67, 3}) * 1000;
  at::Tensor lowest = plain.clone();
  lowest.slice(0, 0, 64).fill_(-kInfinity);
  lowest.select(1, 1).fill_(-kInfinity);
  at::Tensor infinite = plain.clone();
  infinite[5][1] = kInfinity;
  infinite[2][2] = std::numeric_limits<double>::quiet_NaN();
  const at::Tensor target = at::tensor({66, 0, 33}, on(at::kLong));
  for (const DeviceMesh& mesh : meshes()) {
    for (const Placements& layout : uneven_layouts(mesh, 67)) {
      CAPTURE(to_string(layout));
      const bool pending = layout[0].is_partial() || layout.back().is_partial();
      for (const at::Tensor& values : {plain, lowest, infinite}) {
        if (pending && !values.is_same(plain)) continue;
        const at::Tensor x = spread(values, mesh, layout);
        const Tensors got = softmaxes(x), want = softmaxes(values);
        for (std::size_t i = 0; i < want.size(); ++i) {
          CAPTURE(i);
          CHECK(close(full_tensor(got[i]), want[i]));
        }
        const at::Tensor spread_target = spread(target, mesh, Placements(layout.size(), R));
        const Tensors got_losses = losses(x.t(), spread_target, {}), want_losses = losses(values.t(), target, {});
        for (std::size_t i = 0; i < want_losses.size(); ++i) {
          CAPTURE(i);
          CHECK(close(full_tensor(got_losses[i]), want_losses[i]));
        }
      }
    }
  }
}

TESSERA_RANKS_TEST_CASE("softmax and deviations of pieces that are worked through in parts", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor rows = at::arange(700 * 800, on(at::kDouble)).mul(0.37).sin().view({700, 800});  // 4.5 MB
  for (const at::Tensor& whole : {rows, rows.t(), rows.view({70, 10, 800})}) {
    for (const Placement& cut : {S0, S1, Shard(whole.dim() - 1)}) {
      const at::Tensor x = leaf(whole, mesh, {cut}), plain = leaf(whole);
      const auto check = [&](const at::Tensor& got, const at::Tensor& want) {
        CHECK(close(full_tensor(got), want, 1e-11));
        redistribute((got * got).sum(), {R}).backward();
        (want * want).sum().backward();
        CHECK(close(full_tensor(x.grad()), plain.grad(), 1e-11));
        x.mutable_grad().reset();
        plain.mutable_grad().reset();
      };
      for (const int64_t dim : {int64_t{0}, int64_t{1}, int64_t{-1}}) {
        check(x.softmax(dim), plain.softmax(dim));
        check(x.log_softmax(dim), plain.log_softmax(dim));
        check(x.logsumexp(dim), plain.logsumexp(dim));
        check(x.std(dim, true), plain.std(dim, true));
        CHECK(close(full_tensor(x.to(at::kFloat).std(dim, true)), plain.to(at::kFloat).std(dim, true), 1e-6));
      }
      check(x.std(), plain.std());
      check(x.logsumexp(at::IntArrayRef({0, 1})), plain.logsumexp(at::IntArrayRef({0, 1})));
    }
  }
}

TESSERA_RANKS_TEST_CASE("a class outside those of a loss is refused", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = spread(sample({2, 4}), mesh, {S1});
  const at::Tensor wrong = spread(at::tensor({1, 4}, on(at::kLong)), mesh, {R});
  CHECK_THROWS_WITH_AS(at::nll_loss(x, wrong), doctest::Contains("nll_loss: index 4 is outside the classes [0, 4)"),
                       std::exception);
}

TESSERA_RANKS_TEST_CASE("indices of extrema and deviations of narrow dtypes, and into given tensors", {2, 4}) {
  const DeviceMesh mesh = line();
  const at::Tensor values = whole_numbers({90, 4});
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kChar, at::kShort, at::kInt}) {
    CAPTURE(std::string(toString(dtype)));
    const at::Tensor whole = values.to(dtype);
    const at::Tensor x = spread(whole, mesh, {S0});
    CHECK(same(full_tensor(x.argmax(0)), whole.argmax(0)));
    CHECK(same(full_tensor(std::get<1>(x.min(0))), std::get<1>(whole.min(0))));
    if (!at::isFloatingType(dtype)) continue;
    CHECK(close(full_tensor(x.std(0)), whole.std(0), dtype == at::kFloat ? 1e-6 : 0));
    CHECK(close(full_tensor(x.var()), whole.var(), dtype == at::kFloat ? 1e-6 : 0));
    const double last_bit = dtype == at::kFloat ? 1e-6 : dtype == at::kHalf ? 1e-3 : 8e-3;
    CHECK(close(full_tensor(x.softmax(0)), whole.softmax(0), last_bit));
    CHECK(close(full_tensor(x.log_softmax(0)), whole.log_softmax(0), last_bit));
    CHECK(close(full_tensor(x.logsumexp(0)), whole.logsumexp(0), last_bit));
  }
  const at::Tensor flags = values > 2;
  CHECK(same(full_tensor(std::get<1>(spread(flags, mesh, {S0}).max(0))), std::get<1>(flags.max(0))));
  const at::Tensor large = spread(at::full({90, 2}, 300.0, on(at::kHalf)), mesh, {S0});
  CHECK(full_tensor(large.var(0)).eq(0).all().item<bool>());  // its squares overflow in 16 bits

  const at::Tensor x = spread(values, mesh, {S0});
  at::Tensor index = spread(at::zeros({4}, on(at::kLong)), mesh, {R});
  at::argmax_out(index, x, 0);
  CHECK(same(full_tensor(index), values.argmax(0)));
  at::Tensor deviation = spread(at::zeros({4}, on(at::kDouble)), mesh, {R});
  at::std_out(deviation, x, 0, true, false);
  CHECK(close(full_tensor(deviation), values.std(0)));
}

TESSERA_RANKS_TEST_CASE("deviations of equal, large and few numbers", {3}) {
  const DeviceMesh mesh = line();
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const at::Tensor constant = sample({1, 50}, 0, dtype).mul(1000).expand({100, 50}).contiguous();
    CHECK(full_tensor(spread(constant, mesh, {S0}).var(0)).eq(0).all().item<bool>());
    for (const double value : {4.54, 0.1, 1e-3, 777.7}) {
      const at::Tensor all = leaf(at::full({29}, value, on(dtype)), mesh, {S0});
      redistribute(all.std(), {R}).backward();
      CHECK(full_tensor(all.std()).item<double>() == 0);
      CHECK(full_tensor(std::get<0>(at::var_mean(all))).item<double>() == 0);
      CHECK(full_tensor(all.grad()).eq(0).all().item<bool>());
    }
    const at::Tensor x = leaf(constant, mesh, {S0});
    redistribute(x.std(0).sum(), {R}).backward();
    CHECK(full_tensor(x.grad()).eq(0).all().item<bool>());  // LibTorch's value where the deviation is 0
    const at::Tensor far = sample({100, 50}, 0, dtype) + 1e5;
    CHECK(close(full_tensor(spread(far, mesh, {S0}).std(0)), far.std(0), dtype == at::kFloat ? 1e-6 : 1e-11));
  }
  for (const double scale : {1e21, 1e-25}) {  // whose squares float32 does not have
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const at::Tensor x = (sample({100, 5}, 0, at::kFloat) * scale).to(dtype);
      const at::Tensor ratio = full_tensor(spread(x, mesh, {S0}).std(0)) / x.std(0);
      CHECK(ratio.sub(1).abs().max().item<double>() < (dtype == at::kFloat ? 1e-5 : 1e-2));
    }
  }
  const at::Tensor huge = (sample({100, 2}, 0, at::kFloat) * 0.01 + 1) * 1e20;
  const at::Tensor one_piece = spread(huge, mesh, {RaggedShard(0, {100, 0, 0})});
  CHECK((full_tensor(one_piece.var(0)) / huge.var(0)).sub(1).abs().max().item<double>() < 1e-5);

  const at::Tensor whole = at::cat({at::zeros({1, 30}, on(at::kDouble)), sample({2, 30})}).t().contiguous();
  const at::Tensor few = spread(whole, mesh, {S0});
  for (const double correction : {1.0, 30.0, 31.0}) {
    const auto of = [&](const at::Tensor& t) { return at::var(t, at::IntArrayRef({0}), at::Scalar(correction)); };
    CHECK(close(full_tensor(of(few)), of(whole)));
  }
}

TESSERA_RANKS_TEST_CASE("what reductions with indices and deviations communicate", {4}) {
  const DeviceMesh mesh = line();
  const at::Tensor x = spread(sample({800, 6}), mesh, {S0});
  const auto counts = [&](const auto& call) { return collectives_of(mesh, call); };
  CHECK(counts([&] { x.argmax(); }) == "all_reduce 8 all_reduce 8 ");
  CHECK(counts([&] { x.argmax(0); }) == "all_reduce 48 all_reduce 48 ");
  CHECK(counts([&] { x.max(0); }) == "all_reduce 48 all_reduce 48 ");
  const auto operator_of = [&](auto&& call) {
    const CommCounter counter(mesh);
    call();
    return counter.records().at(0).op;
  };
  CHECK(operator_of([&] { x.softmax(0); }) == "aten::_softmax");
  CHECK(operator_of([&] { x.std(0); }) == "aten::std");
  CHECK(counts([&] { x.argmax(1); }).empty());
  CHECK(counts([&] { at::aminmax(x); }).empty());
  CHECK(counts([&] { x.var(0); }) == "all_gather 104 ");  // means, squares, and a number of rows
  CHECK(counts([&] { x.std(); }) == "all_gather 24 ");
  CHECK(counts([&] { at::var_mean(x, 0); }) == "all_gather 104 ");
  CHECK(counts([&] { x.logsumexp(0); }) == "all_reduce 48 all_reduce 48 ");
  const at::Tensor target = spread(at::tensor({0, 700, 3, 3, 1, 2}, on(at::kLong)), mesh, {R});
  const at::Tensor scores = leaf(sample({800, 6}), mesh, {S0});
  at::Tensor loss;
  CHECK(counts([&] { loss = at::nll_loss(scores.t().log_softmax(1), target); }) == "all_reduce 48 all_reduce 48 ");
  loss = redistribute(loss, {R});
  CHECK(counts([&] { loss.backward(); }) == "all_reduce 48 ");
  CHECK((placements_of(scores.grad()) == Placements{S0}));
  const at::Tensor whole = spread(sample({800, 6}), mesh, {R});
  CHECK(counts([&] { whole.argmax(0), whole.var(), at::aminmax(whole); }).empty());
  // Pieces that are no larger than what the ranks would join are moved.
  CHECK(counts([&] { spread(sample({4, 80}), mesh, {S0}).softmax(0); }) == "all_to_all 640 ");
  const Strict strict;
  const at::Tensor sum = at::nll_loss(spread(sample({6, 800}), mesh, {S1}), target, {}, at::Reduction::Sum);
  const at::Tensor mean = at::nll_loss(spread(sample({6, 800}), mesh, {S1}), target);
  CHECK(placements_of(sum)[0].is_partial());
  CHECK(placements_of(mean)[0].is_partial());
  CHECK_THROWS_WITH_AS(x.argmax(), doctest::Contains("join what each of them finds in its piece of Double [800, 6]"),
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(x.std(), doctest::Contains("aten::std"), std::runtime_error);
  const OpExplanation told = explain_op("aten::_softmax", {x, 0, false});
  REQUIRE(told.steps.size() == 1);
  CHECK(told.steps[0].find("the ranks join") == 0);
  CHECK(told.outputs == std::vector<Placements>{{S0}});
}

TESSERA_RANKS_TEST_CASE("on one rank nothing is joined, and Strict refuses nothing", {1}) {
  const Strict strict;
  const at::Tensor x = spread(sample({80, 6}), line(), {S0});
  const Tensors results = {x.softmax(0), x.logsumexp(0), x.argmax(), std::get<0>(x.max(0)), x.std(0)};
  CHECK(same(full_tensor(results[0]), sample({80, 6}).softmax(0)));
}
