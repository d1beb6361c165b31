#include "tessera/placement/reduction.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/placement/placement.h"

using namespace tessera;

namespace {

// Stands for a user's reduction that overrides nothing.
class Mine final : public Reduction {
 public:
  explicit Mine(ReduceOp op = ReduceOp::kSum) : Reduction("mine", op) {}
};

}  // namespace

TEST_CASE("a reduction that has no meaning for a dtype is refused with what to do") {
  struct Row {
    ReduceOp op;
    at::ScalarType dtype;
    std::string want;
  };
  const std::vector<Row> rows = {
      {ReduceOp::kBitAnd, at::kFloat, "test: bit_and of Float is not defined; bits are those of integers and bool"},
      {ReduceOp::kSum, at::kBool,
       "test: sum of Bool is not defined; use max (any) or min (all), or convert to an integer"},
      {ReduceOp::kProduct, at::kBool, "test: product of Bool is not defined"},
      {ReduceOp::kAvg, at::kLong,
       "test: avg of Long is not defined; use sum and divide, or convert to a floating dtype"},
      {ReduceOp::kMax, at::kComplexFloat, "test: max of ComplexFloat is not defined; complex numbers have no order"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.want);
    CHECK_THROWS_WITH_AS(check_reduces(row.op, row.dtype, "test"), doctest::Contains(row.want.c_str()),
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(masked_reduction(row.op)->check(row.dtype, "test"), doctest::Contains(row.want.c_str()),
                         std::invalid_argument);
  }
  CHECK_THROWS_WITH_AS(norm_reduction(2)->check(at::kLong, "test"),
                       doctest::Contains("test: P(norm 2) of Long is not defined; convert to a floating dtype"),
                       std::invalid_argument);
  check_reduces(ReduceOp::kMax, at::kBool, "test");
  check_reduces(ReduceOp::kBitXor, at::kLong, "test");
}

TEST_CASE("what is no reduction is refused") {
  CHECK_THROWS_WITH_AS(norm_reduction(0), doctest::Contains("a norm of order 0; give a finite order other than 0"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(norm_reduction(std::numeric_limits<double>::infinity()),
                       doctest::Contains("a norm of order inf"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(Partial(ReductionPtr()),
                       doctest::Contains("Partial: the reduction is null; give one, or a ReduceOp"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(
      Mine{ReduceOp::kAvg},
      doctest::Contains("Reduction: mine reduces its terms by avg; reduce by sum and divide in from_terms"),
      std::invalid_argument);
  CHECK_THROWS_WITH_AS(neutral_of(ReduceOp::kAvg, at::kFloat), doctest::Contains("avg has no neutral element"),
                       std::logic_error);
}

TEST_CASE("a norm is never negative") {
  const at::Tensor value = at::tensor({1.0, -2.0});
  const char* const want = "a value with negative elements cannot be P(norm 2), which is never negative";
  CHECK_THROWS_WITH_AS(norm_reduction(2)->spread(value, 0, 2), doctest::Contains(want), std::runtime_error);
  CHECK_THROWS_WITH_AS(norm_reduction(2)->only_piece(value, 2), doctest::Contains(want), std::runtime_error);
}

TEST_CASE("a user's reduction that has not said its derivative says which method is missing") {
  const Mine mine;
  const Reduction::Peers nobody{.ranks = 1, .all_reduce = [](const at::Tensor& t, ReduceOp) { return t; }};
  CHECK_THROWS_WITH_AS(
      mine.derivative(at::ones({2}), nobody),
      doctest::Contains("the gradient of a piece of P(mine) is not known: implement Reduction::derivative (or slope)"),
      std::runtime_error);
  // Everything else follows from its op.
  CHECK(at::equal(mine.spread(at::ones({2}), 1, 2), at::zeros({2})));
  CHECK(at::equal(mine.only_piece(at::ones({2}), 2), at::ones({2})));
  CHECK_FALSE(mine.slope(2).has_value());
  mine.check(at::kFloat, "test");
  CHECK_THROWS_WITH_AS(mine.check(at::kBool, "test"), doctest::Contains("sum of Bool is not defined"),
                       std::invalid_argument);
}

namespace {

// Stands for a user's reduction whose terms are not its pieces, and which does not say how pieces are made.
class LogSumExp : public Reduction {
 public:
  LogSumExp() : Reduction("lse", ReduceOp::kSum) {}
  at::Tensor to_term(const at::Tensor& piece) const override { return piece.exp(); }
  at::Tensor from_terms(const at::Tensor& terms, int64_t) const override { return terms.log(); }
};

class Neutral final : public LogSumExp {
 public:
  c10::Scalar neutral(at::ScalarType) const override { return -std::numeric_limits<double>::infinity(); }
};

class NoSpread final : public LogSumExp {
 public:
  at::Tensor spread(const at::Tensor&, int64_t, int64_t) const override { return {}; }
};

class HalfSpread final : public LogSumExp {
 public:
  at::Tensor spread(const at::Tensor& value, int64_t, int64_t ranks) const override {
    return value - std::log(static_cast<double>(ranks));
  }
};

}  // namespace

TEST_CASE("what a reduction makes of a value must reduce to it") {
  CHECK_THROWS_WITH_AS(
      check_spread(LogSumExp(), at::kFloat, "test"),
      doctest::Contains(
          "test: the pieces that P(lse) makes of a value do not reduce to that value (tried over 2 ranks): "
          "its terms are not its pieces, so implement Reduction::spread, or Reduction::neutral"),
      std::invalid_argument);
  CHECK_THROWS_WITH_AS(check_spread(HalfSpread(), at::kFloat, "test"),
                       doctest::Contains("implement Reduction::only_piece and Reduction::neutral"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(
      check_spread(Neutral(), at::kInt, "test"),
      doctest::Contains("Reduction::neutral of P(lse) is -inf, which no tensor of Int can hold; refuse "
                        "this dtype in Reduction::check"),
      std::invalid_argument);
  CHECK_THROWS_WITH_AS(check_spread(NoSpread(), at::kFloat, "test"),
                       doctest::Contains("Reduction::spread of P(lse) has returned an undefined tensor"),
                       std::invalid_argument);
  check_spread(Neutral(), at::kFloat, "test");
  check_spread(Mine(), at::kLong, "test");
  for (const double p : {2.0, 0.5, -1.0}) check_spread(*norm_reduction(p), at::kHalf, "test");
  check_spread(*masked_reduction(ReduceOp::kMax), at::kLong, "test");
  check_spread(*plain_reduction(ReduceOp::kAvg), at::kDouble, "test");
}

namespace {

// Has a neutral piece that float32 has, and half has not.
class FarNeutral final : public LogSumExp {
 public:
  c10::Scalar neutral(at::ScalarType) const override { return -1e30; }
};

// Divides by a number that is not the product of those of two mesh dimensions.
class Uneven final : public Reduction {
 public:
  Uneven() : Reduction("uneven", ReduceOp::kSum) {}
  at::Tensor from_terms(const at::Tensor& terms, int64_t ranks) const override { return terms.div(2 * ranks - 1); }
  at::Tensor only_piece(const at::Tensor& value, int64_t ranks) const override { return value.mul(2 * ranks - 1); }
  at::Tensor spread(const at::Tensor& value, int64_t coordinate, int64_t ranks) const override {
    return Reduction::spread(only_piece(value, ranks), coordinate, ranks);
  }
};

// Is a sum whose pieces have another dtype than the value.
class Wide final : public Reduction {
 public:
  Wide() : Reduction("wide", ReduceOp::kSum) {}
  at::Tensor only_piece(const at::Tensor& value, int64_t) const override { return value.to(at::kDouble); }
};

}  // namespace

TEST_CASE("pieces are tried in the dtype that they will have") {
  check_spread(FarNeutral(), at::kFloat, "test");
  CHECK_THROWS(check_spread(FarNeutral(), at::kHalf, "test"));
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat8_e4m3fn}) {
    CAPTURE(c10::toString(dtype));
    check_spread(Neutral(), dtype, "test");
    check_spread(Wide(), dtype, "test");
    CHECK_THROWS_AS(check_spread(LogSumExp(), dtype, "test"), std::invalid_argument);
  }
}

TEST_CASE("over two mesh dimensions a value must not depend on how they are reduced") {
  check_spread(Uneven(), at::kFloat, "test");
  CHECK_THROWS_WITH_AS(check_spread(Uneven(), at::kFloat, "test", /*nested=*/true),
                       doctest::Contains("test: the value of P(uneven) over two mesh dimensions is not the same"),
                       std::invalid_argument);
  for (const double p : {2.0, 0.5, -1.0}) check_spread(*norm_reduction(p), at::kFloat, "test", /*nested=*/true);
  check_spread(*masked_reduction(ReduceOp::kAvg), at::kBFloat16, "test", /*nested=*/true);
  check_spread(Neutral(), at::kDouble, "test", /*nested=*/true);
}

TEST_CASE("terms of half do not overflow where the value does not") {
  const at::Tensor piece = at::full({2}, 300, at::kHalf);
  CHECK((norm_reduction(2)->to_term(piece).scalar_type() == at::kFloat));
  CHECK((plain_reduction(ReduceOp::kAvg)->to_term(piece).scalar_type() == at::kFloat));
  CHECK((plain_reduction(ReduceOp::kSum)->to_term(piece).scalar_type() == at::kHalf));
}

TEST_CASE("the gradient of a norm is 0 at 0, whatever the order") {
  const Reduction::Peers nobody{.ranks = 1, .all_reduce = [](const at::Tensor& t, ReduceOp) { return t; }};
  const at::Tensor got = norm_reduction(0.5)->derivative(at::tensor({0.0, 4.0}), nobody);
  CHECK(at::equal(got, at::tensor({0.0, 1.0})));
}

namespace {

// Has terms, or a value, of other sizes than its pieces.
class Reshaping final : public Reduction {
 public:
  explicit Reshaping(bool terms)
      : Reduction(terms ? "doubled terms" : "narrowed value", ReduceOp::kSum), terms_(terms) {}
  at::Tensor to_term(const at::Tensor& piece) const override { return terms_ ? at::stack({piece, piece}) : piece; }
  at::Tensor from_terms(const at::Tensor& terms, int64_t) const override {
    return terms_ ? terms : terms.sum(-1, /*keepdim=*/true);
  }

 private:
  const bool terms_;
};

}  // namespace

TEST_CASE("terms of other sizes than their piece, and a value of other sizes than its terms, are refused") {
  const std::string doubled = "Reduction::to_term of P(doubled terms) has made a tensor [2, 4] of one [4]";
  CHECK_THROWS_WITH_AS(term_of(Reshaping(true), at::ones({4})), doctest::Contains(doubled.c_str()),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(
      value_of_terms(Reshaping(false), at::ones({4, 8}), 2),
      doctest::Contains("Reduction::from_terms of P(narrowed value) has made a tensor [4, 1] of one [4, 8]"),
      std::invalid_argument);
  CHECK_THROWS_WITH_AS(check_spread(Reshaping(true), at::kFloat, "test"), doctest::Contains("Reduction::to_term"),
                       std::invalid_argument);
}

TEST_CASE("pieces may be converted before they are reduced where the value is then the converted one") {
  struct Row {
    const char* why;
    ReduceOp op;
    at::ScalarType from, to;
    bool want;
  };
  const std::vector<Row> rows = {
      {"rounding alone", ReduceOp::kSum, at::kFloat, at::kBFloat16, true},
      {"parts below 1 are lost", ReduceOp::kSum, at::kFloat, at::kLong, false},
      {"-0.5 and 0 have the maximum 0", ReduceOp::kMax, at::kFloat, at::kBool, false},
      {"-1 and 0 have the maximum 0", ReduceOp::kMax, at::kLong, at::kBool, false},
      {"2 and 1 have no bit in common", ReduceOp::kBitAnd, at::kLong, at::kBool, false},
      {"bool is 0 or 1", ReduceOp::kMax, at::kBool, at::kChar, true},
      {"the real part of a sum is a sum", ReduceOp::kSum, at::kComplexFloat, at::kFloat, true},
      {"the real part of i * i is -1", ReduceOp::kProduct, at::kComplexFloat, at::kFloat, false},
      {"the smallest long is 0 as an int", ReduceOp::kMax, at::kLong, at::kInt, false},
      {"255 is -1 as a char", ReduceOp::kMin, at::kByte, at::kChar, false},
      {"-1 is 255 as a byte", ReduceOp::kMax, at::kChar, at::kByte, false},
      {"a wider dtype", ReduceOp::kMax, at::kByte, at::kShort, true},
      {"sums modulo a power of 2", ReduceOp::kSum, at::kLong, at::kInt, true},
      {"integers as floats", ReduceOp::kMax, at::kInt, at::kFloat, true},
      {"infinity is NaN there", ReduceOp::kMax, at::kFloat, at::kFloat8_e4m3fn, false},
      {"infinity stays", ReduceOp::kMax, at::kFloat, at::kFloat8_e5m2, true},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    CHECK(commutes_with_conversion(*plain_reduction(row.op), row.from, row.to) == row.want);
    CHECK(commutes_with_conversion(*masked_reduction(row.op), row.from, row.to) == row.want);
  }
  // A user's reduction may take magnitudes, and that of -3 is not that of 253.
  CHECK_FALSE(commutes_with_conversion(Mine(), at::kLong, at::kByte));
  CHECK(commutes_with_conversion(Mine(), at::kInt, at::kLong));
  CHECK(commutes_with_conversion(Mine(), at::kDouble, at::kFloat));
}
