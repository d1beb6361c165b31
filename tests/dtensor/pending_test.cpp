#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/placement/reduction.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/harness/ranks.h"
#include "tessera/tests/harness/skip.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Holds a pending reduction, and what one process computes from the pieces of all ranks as rows.
struct Pending {
  Placement placement;
  std::function<at::Tensor(const at::Tensor&)> reduce;
};

at::Tensor norm(const at::Tensor& rows, double p) { return rows.abs().pow(p).sum(0).pow(1 / p); }

std::vector<Pending> all_kinds() {
  return {{Partial(), [](const at::Tensor& rows) { return rows.sum(0); }},
          {Partial(ReduceOp::kAvg), [](const at::Tensor& rows) { return rows.mean(0); }},
          {Partial(ReduceOp::kMax), [](const at::Tensor& rows) { return rows.amax(0); }},
          {Partial(ReduceOp::kMin), [](const at::Tensor& rows) { return rows.amin(0); }},
          {Partial(ReduceOp::kProduct), [](const at::Tensor& rows) { return rows.prod(0); }},
          {NormPartial(2), [](const at::Tensor& rows) { return norm(rows, 2); }},
          {NormPartial(3), [](const at::Tensor& rows) { return norm(rows, 3); }},
          {NormPartial(-1), [](const at::Tensor& rows) { return norm(rows, -1); }}};
}

// Returns rows of which some are equal and some zero: products have no, one and several zero factors.
at::Tensor rows_with_ties(int64_t n) {
  at::Tensor rows = (at::arange(n * 8, on(at::kDouble)) * 5 % 7 - 2).view({n, 8}).clone();
  rows.select(1, 3).fill_(2);
  rows.select(1, 4)[0] = 0;
  return rows;
}

// Is a user's reduction that defines only its operator.
class Bare final : public Reduction {
 public:
  Bare() : Reduction("bare", ReduceOp::kProduct) {}
};

// Is a user's sum that makes pieces of float64, whatever the value's dtype is.
class Wide final : public Reduction {
 public:
  Wide() : Reduction("wide", ReduceOp::kSum) {}
  at::Tensor spread(const at::Tensor& value, int64_t coordinate, int64_t /*ranks*/) const override {
    return coordinate == 0 ? value.to(at::kDouble) : at::zeros_like(value, value.options().dtype(at::kDouble));
  }
  at::Tensor only_piece(const at::Tensor& value, int64_t /*ranks*/) const override { return value.to(at::kDouble); }
};

// Is a user's sum that makes flat pieces.
class Flat final : public Reduction {
 public:
  Flat() : Reduction("flat", ReduceOp::kSum) {}
  at::Tensor spread(const at::Tensor& value, int64_t coordinate, int64_t ranks) const override {
    return Reduction::spread(value, coordinate, ranks).flatten();
  }
  at::Tensor only_piece(const at::Tensor& value, int64_t /*ranks*/) const override { return value.flatten(); }
};

// Is a user's sum that is reduced as a product of exponentials.
class LogOfProduct final : public Reduction {
 public:
  LogOfProduct() : Reduction("log of product", ReduceOp::kProduct) {}
  at::Tensor to_term(const at::Tensor& piece) const override { return piece.exp(); }
  at::Tensor from_terms(const at::Tensor& terms, int64_t /*ranks*/) const override { return terms.log(); }
  c10::Scalar neutral(at::ScalarType /*dtype*/) const override { return 0; }
  std::optional<double> slope(int64_t /*ranks*/) const override { return 1; }
};

}  // namespace

TESSERA_RANKS_TEST_CASE("the gradient of a piece is the derivative of the value, ties and zeros too", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const auto me = mesh.local_rank(0);
  const at::Tensor weight = sample({8}, 3);
  for (const Pending& kind : all_kinds()) {
    CAPTURE(to_string(kind.placement));
    const at::Tensor whole =
        rows_with_ties(mesh.size()) + (kind.placement.reduction().text().starts_with("norm") ? 10 : 0);
    const at::Tensor rows = whole.clone().requires_grad_(true);
    const at::Tensor want = kind.reduce(rows);
    (want * weight).sum().backward();
    const at::Tensor piece = whole[me].clone().requires_grad_(true);
    const at::Tensor got = from_local(piece, mesh, {kind.placement});
    CHECK(close(full_tensor(got).detach(), want.detach()));
    (full_tensor(got) * weight).sum().backward();
    CHECK(close(piece.grad(), rows.grad()[me]));
  }
}

TESSERA_RANKS_TEST_CASE("over two mesh dimensions the terms of all ranks count together", {4}) {
  const DeviceMesh mesh = mesh_over({2, 2});
  for (const Pending& kind : all_kinds()) {
    CAPTURE(to_string(kind.placement));
    const at::Tensor whole = rows_with_ties(4) + 10;
    const at::Tensor rows = whole.clone().requires_grad_(true);
    const at::Tensor want = kind.reduce(rows);
    want.sum().backward();
    const at::Tensor piece = whole[rank()].clone().requires_grad_(true);
    const at::Tensor got = from_local(piece, mesh, {kind.placement, kind.placement});
    CHECK(close(full_tensor(got).detach(), want.detach()));
    full_tensor(got).sum().backward();
    CHECK(close(piece.grad(), rows.grad()[rank()]));
  }
}

TESSERA_RANKS_TEST_CASE("what a mask leaves out counts for nothing and gets no gradient", {1, 2, 3}) {
  const DeviceMesh mesh = line();
  const int64_t n = mesh.size();
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kProduct}) {
    CAPTURE(to_string(op));
    const at::Tensor whole = rows_with_ties(n) + 3;
    // Every element counts on some rank.
    const at::Tensor counts =
        (at::arange(n, on(at::kLong)).unsqueeze(1) + at::arange(8, on(at::kLong))).remainder(2) == 0;
    const at::Tensor masks = n == 1 ? at::ones({1, 8}, on(at::kBool)) : counts;
    const at::Tensor rows = whole.clone().requires_grad_(true);
    const double neutral = op == ReduceOp::kSum ? 0 : (op == ReduceOp::kMax ? -1e300 : 1);
    const at::Tensor kept = at::where(masks, rows, at::full_like(rows, neutral));
    const at::Tensor want = op == ReduceOp::kSum ? kept.sum(0) : (op == ReduceOp::kMax ? kept.amax(0) : kept.prod(0));
    want.sum().backward();
    const auto me = mesh.local_rank(0);
    const at::Tensor piece = whole[me].clone().requires_grad_(true);
    FromLocalOptions options;
    options.mask = masks[me];
    const at::Tensor got = from_local(piece, mesh, {MaskedPartial(op)}, options);
    CHECK(placements_of(got) == Placements{MaskedPartial(op)});
    CHECK(close(full_tensor(got).detach(), want.detach()));
    full_tensor(got).sum().backward();
    CHECK(close(piece.grad(), at::where(masks[me], rows.grad()[me], at::zeros({8}, on(at::kDouble)))));
    // Nothing is sent from the masked reduction to the plain one and back.
    const CommCounter counter(mesh);
    CHECK(same(to_local(redistribute(redistribute(got, {Partial(op)}), {MaskedPartial(op)})).detach(),
               to_local(got).detach()));
    CHECK(counter.total() == 0);
  }
}

TESSERA_RANKS_TEST_CASE("pending reductions and masks that make no sense are refused", {2}) {
  const DeviceMesh mesh = line();
  const at::Tensor piece = at::ones({3}, on(at::kFloat));
  const auto refused = [&](const at::Tensor& local, const Placement& placement, const at::Tensor& mask,
                           const char* part) {
    CAPTURE(part);
    FromLocalOptions options;
    options.mask = mask;
    CHECK_THROWS_WITH_AS(from_local(local, mesh, {placement}, options), doctest::Contains(part), std::invalid_argument);
  };
  refused(piece, Partial(), at::ones({3}, on(at::kBool)), "needs a MaskedPartial placement");
  refused(piece, MaskedPartial(), at::ones({4}, on(at::kBool)), "a mask of Bool [4] for a piece [3]");
  refused(piece, MaskedPartial(), at::ones({3}, on(at::kFloat)), "a mask of Float [3]");
  refused(piece, Partial(ReduceOp::kBitXor), {}, "bit_xor of Float is not defined");
  refused(at::ones({3}, on(at::kLong)), NormPartial(2), {}, "P(norm 2) of Long is not defined");
  CHECK_THROWS_WITH_AS(NormPartial(0), doctest::Contains("a norm of order 0"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(NormPartial(std::numeric_limits<double>::infinity()), doctest::Contains("Partial(max)"),
                       std::invalid_argument);
}

TESSERA_RANKS_TEST_CASE("negative values are no pending norm", {2}) {
  if (device().is_cuda()) TESSERA_SKIP("a GPU checks the values later, and then computes nothing more");
  const DeviceMesh mesh = line();
  const at::Tensor negative = from_local(at::full({3}, -1.0, on(at::kFloat)), mesh, {Replicate()});
  CHECK_THROWS_WITH_AS(redistribute(negative, {NormPartial(2)}),
                       doctest::Contains("negative elements cannot be P(norm 2)"), std::runtime_error);
}

TESSERA_RANKS_TEST_CASE("a user's reduction redistributes by its operator, and its gradient names what is missing",
                        {2}) {
  const DeviceMesh mesh = line();
  const Placement bare = Partial(std::make_shared<const Bare>());
  const at::Tensor piece = at::full({4}, 3.0, on(at::kDouble)).requires_grad_(true);
  const at::Tensor value = from_local(piece, mesh, {bare});
  CHECK(same(full_tensor(value).detach(), at::full({4}, 9.0, on(at::kDouble))));
  CHECK(same(full_tensor(redistribute(redistribute(value, {Shard(0)}), {bare})).detach(),
             at::full({4}, 9.0, on(at::kDouble))));
  CHECK(to_string(bare) == "P(bare)");
  CHECK_THROWS_WITH_AS(full_tensor(value).sum().backward(),
                       doctest::Contains("implement Reduction::derivative (or slope)"), std::runtime_error);
}

TESSERA_RANKS_TEST_CASE("pieces that a user's reduction makes in another dtype are converted, in other sizes refused",
                        {2, 3}) {
  const DeviceMesh mesh = line();
  const at::Tensor whole = sample({6, 2}, 0, at::kFloat);
  const Placement wide = Partial(std::make_shared<const Wide>()), flat = Partial(std::make_shared<const Flat>());
  for (const Placement& from : {R, S0}) {
    CAPTURE(to_string(from));
    const at::Tensor moved = redistribute(spread(whole, mesh, {from}), {wide});
    CHECK((to_local(moved).scalar_type() == at::kFloat));
    CHECK(same(full_tensor(moved), whole));
  }
  // The job fails, and nothing can be communicated any more.
  for (const Placement& from : {R, S0}) {
    CHECK_THROWS_WITH_AS(redistribute(spread(whole, mesh, {from}), {flat}),
                         doctest::Contains("of P(flat) has made a piece ["), std::invalid_argument);
  }
}

TESSERA_RANKS_TEST_CASE("linear reductions that reduce by other operations are pending together", {4}) {
  const DeviceMesh mesh = mesh_over({2, 2});
  const Placement product = Partial(std::make_shared<const LogOfProduct>());
  const at::Tensor rows = sample({4, 5});
  const at::Tensor piece = rows[world()->rank()];
  for (const Placements& pending : {Placements{P, product}, Placements{product, P}, Placements{product, product}}) {
    CAPTURE(to_string(pending));
    const at::Tensor value = from_local(piece, mesh, pending);
    CHECK(close(full_tensor(value), rows.sum(0)));
    CHECK(close(full_tensor(redistribute(value, {R, product})), rows.sum(0)));
    CHECK(close(full_tensor(redistribute(value, {P, P})), rows.sum(0)));
  }
}

TESSERA_RANKS_TEST_CASE("a conversion to a dtype of a smaller range comes after the reduction", {1, 2, 3, 4}) {
  const DeviceMesh mesh = line();
  const auto cut = [&](const std::vector<double>& values) {
    return spread(at::tensor(values, on(at::kDouble)), mesh, {Shard(0)});
  };
  const at::Tensor product = cut({1e30, 1e30, 1e-30, 1e-30}).prod(), sum = cut({1e39, 1e39, -1e39, -1e39}).sum();
  CHECK(full_tensor(product.to(at::kFloat)).item<float>() == doctest::Approx(1));
  CHECK(full_tensor(sum.to(at::kFloat)).item<float>() == 0);
  CHECK(full_tensor(at::zeros_like(sum, at::kFloat).copy_(sum)).item<float>() == 0);
  const at::Tensor x = cut({-1000, 1, -3, 2}).to(at::kFloat);
  CHECK(full_tensor(x.amax().to(at::kFloat8_e4m3fn)).to(at::kFloat).item<float>() == 2);
  CHECK(full_tensor((-x).amin().to(at::kFloat8_e4m3fn)).to(at::kFloat).item<float>() == -2);
  // The terms of a float64 stay pending where they are converted to no smaller range.
  if (mesh.size() > 1) CHECK(placements_of(x.sum().to(at::kDouble)) == Placements{Partial()});
}

TESSERA_RANKS_TEST_CASE("a product of float8 that gives float8 has no terms of float8", {1, 2}) {
  const DeviceMesh mesh = line();
  at::Tensor a = at::zeros({16, 32}, on(at::kFloat)), b = at::zeros({16, 32}, on(at::kFloat));
  a.select(1, 0).fill_(20);
  a.select(1, 16).fill_(-20);
  b.select(1, 0).fill_(30);
  b.select(1, 16).fill_(30);
  const auto cut = [&](const at::Tensor& t) { return spread(t.to(at::kFloat8_e4m3fn), mesh, {Shard(1)}); };
  const at::Tensor one = at::ones({}, on(at::kFloat)), scale = spread(one, mesh, {Replicate()});
  const at::Tensor y = at::_scaled_mm(cut(a), cut(b).t(), scale, scale);
  CHECK((y.scalar_type() == at::kFloat8_e4m3fn));
  CHECK(same(full_tensor(y).to(at::kFloat), at::zeros({16, 16}, on(at::kFloat))));
}

TESSERA_RANKS_TEST_CASE("operators on pending sums of integers and complex numbers reduce them first", {1, 2, 3, 4}) {
  const at::Tensor counts = at::arange(12, on(at::kLong));
  const at::Tensor waves = at::complex(sample({6}), sample({6}, 1));
  using Op = at::Tensor (*)(const at::Tensor&);
  for (const DeviceMesh& mesh : meshes()) {
    const Placements cut(static_cast<std::size_t>(mesh.ndim()), Shard(0));
    const auto check = [&](const at::Tensor& whole, Op op) {
      const at::Tensor want = op(whole), got = full_tensor(op(spread(whole, mesh, cut)));
      CHECK((got.scalar_type() == want.scalar_type()));
      CHECK(close(got.is_complex() ? at::view_as_real(got) : got, want.is_complex() ? at::view_as_real(want) : want));
    };
    for (const at::ScalarType dtype : {at::kLong, at::kInt, at::kByte}) {
      const at::Tensor x = counts.to(dtype);
      for (const Op op : std::initializer_list<Op>{
               [](const at::Tensor& t) { return t.sum() + 1; }, [](const at::Tensor& t) { return (t > 3).sum() - 1; },
               [](const at::Tensor& t) { return t.max() + 1; },
               [](const at::Tensor& t) { return at::rsub(t.min(), 3); },
               [](const at::Tensor& t) { return t.sum().add_(1); }, [](const at::Tensor& t) { return t.sum() + 1.5; },
               [](const at::Tensor& t) { return at::count_nonzero(t) + 1; }})
        check(x, op);
    }
    for (const Op op : std::initializer_list<Op>{[](const at::Tensor& t) { return t.sum().exp(); },
                                                 [](const at::Tensor& t) { return t.sum().tanh(); },
                                                 [](const at::Tensor& t) { return at::fill(t.sum(), 3); },
                                                 [](const at::Tensor& t) {
                                                   return at::constant_pad_nd(t.unsqueeze(1).sum(0), {1, 1}, 3);
                                                 }})
      check(waves, op);
  }
}
