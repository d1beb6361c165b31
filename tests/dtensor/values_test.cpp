// Tests the comparisons that the other tests use.

#include <limits>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/tests/dtensor/values.h"

using namespace tessera::testing;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kMost = std::numeric_limits<double>::max();

at::Tensor of(const std::vector<double>& numbers, at::ScalarType dtype = at::kDouble) {
  return at::tensor(numbers, at::kDouble).to(dtype);
}

struct Row {
  const char* why;
  std::vector<double> a, b;
  bool want_same, want_close;
};

const std::vector<Row> kRows = {
    {"equal numbers", {1, -2, 0}, {1, -2, 0}, true, true},
    {"another number", {1, -2, 0}, {1, -2, 3}, false, false},
    {"less than the tolerance apart", {1, 2}, {1, 2 + 1e-13}, false, true},
    {"of the largest magnitude", {1e6, 1}, {1e6, 1 + 1e-7}, false, true},
    {"the same places of everything", {kNan, kInfinity, -kInfinity, 1}, {kNan, kInfinity, -kInfinity, 1}, true, true},
    {"NaN and a number", {kNan, 1}, {12345, 1}, false, false},
    {"NaN and an infinity", {kNan, 1}, {kInfinity, 1}, false, false},
    {"an infinity and the largest number", {kInfinity}, {kMost}, false, false},
    {"minus an infinity and the least number", {-kInfinity}, {-kMost}, false, false},
    {"an infinity and what once stood for it", {kInfinity, 1}, {12345, 1}, false, false},
    {"infinities of both signs", {kInfinity}, {-kInfinity}, false, false},
    {"a wrong number beside an infinity", {kInfinity, 1}, {kInfinity, 1.1}, false, false},
    {"a wrong small number beside NaN", {kNan, 1}, {kNan, 1 + 1e-9}, false, false},
    {"none", {}, {}, true, true},
};

}  // namespace

TEST_CASE("same and close tell NaN, infinities and numbers apart, whichever comes first") {
  for (const Row& row : kRows) {
    CAPTURE(row.why);
    for (const auto& [a, b] : {std::pair{of(row.a), of(row.b)}, std::pair{of(row.b), of(row.a)}}) {
      CHECK(same(a, b) == row.want_same);
      CHECK(close(a, b) == row.want_close);
    }
  }
  CHECK(close(of({1, 2}), of({1, 2.5}), 0.25));
  CHECK_FALSE(close(of({1, 2}), of({1, 2.5}), 0.1));
}

TEST_CASE("same and close of every kind of dtype") {
  for (const at::ScalarType dtype :
       {at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kByte, at::kBool, at::kComplexDouble}) {
    CAPTURE(dtype);
    const at::Tensor a = of({1, 0}, dtype);
    CHECK(same(a, of({1, 0}, dtype)));
    CHECK(close(a, of({1, 0}, dtype)));
    CHECK_FALSE(same(a, of({1, 1}, dtype)));
    CHECK_FALSE(close(a, of({1, 1}, dtype)));
    CHECK_FALSE(same(a, of({1, 0})));
    CHECK_FALSE(close(a, of({1, 0})));
  }
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kComplexDouble}) {
    CAPTURE(dtype);
    CHECK(same(of({kNan, kInfinity}, dtype), of({kNan, kInfinity}, dtype)));
    CHECK(close(of({kNan, kInfinity}, dtype), of({kNan, kInfinity}, dtype)));
    CHECK_FALSE(same(of({kNan, kInfinity}, dtype), of({kInfinity, kNan}, dtype)));
    CHECK_FALSE(close(of({kNan, kInfinity}, dtype), of({kInfinity, kNan}, dtype)));
  }
}

TEST_CASE("tensors of other sizes are neither same nor close, whatever is in them") {
  const at::Tensor row = at::zeros({1, 4}), column = at::zeros({4, 1});
  CHECK_FALSE(same(row, column));
  CHECK_FALSE(close(row, column));
  CHECK_FALSE(same(at::zeros({0, 3}), at::zeros({0, 4})));
  CHECK(same(at::zeros({0, 3}), at::zeros({0, 3})));
}

TEST_CASE("strides and a gradient make no difference") {
  const at::Tensor x = sample({3, 4});
  CHECK(same(x.t(), x.t().contiguous()));
  CHECK(close(leaf(x), x));
  CHECK(same(leaf(x) * 1, x));
}
