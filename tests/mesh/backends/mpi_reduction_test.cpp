#include "tessera/mesh/backends/mpi_reduction.h"

#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

using tessera::MpiReduction;
using Op = c10d::ReduceOp::RedOpType;

namespace {

at::Tensor reduce(Op op, const at::Tensor& rows) {
  const at::Tensor out = at::empty(rows.sizes().slice(1), rows.options());
  MpiReduction(c10d::ReduceOp(op), rows.scalar_type(), "test").apply(rows, out);
  return out;
}

}  // namespace

TEST_CASE("rows are reduced, two of them and more") {
  struct Row {
    Op op;
    std::vector<int64_t> two;
    std::vector<int64_t> three;
  };
  const at::Tensor rows = at::tensor({3, 5, 6, 1, 5, 2, 2, 4, 7}, at::kInt).view({3, 3});
  const std::vector<Row> table = {
      {c10d::ReduceOp::SUM, {4, 10, 8}, {6, 14, 15}},   {c10d::ReduceOp::PRODUCT, {3, 25, 12}, {6, 100, 84}},
      {c10d::ReduceOp::MIN, {1, 5, 2}, {1, 4, 2}},      {c10d::ReduceOp::MAX, {3, 5, 6}, {3, 5, 7}},
      {c10d::ReduceOp::BAND, {1, 5, 2}, {0, 4, 2}},     {c10d::ReduceOp::BOR, {3, 5, 6}, {3, 5, 7}},
      {c10d::ReduceOp::BXOR, {3 ^ 1, 0, 4}, {0, 4, 3}},
  };
  for (const Row& row : table) {
    CAPTURE(static_cast<int>(row.op));
    for (const at::ScalarType dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
      CAPTURE(c10::toString(dtype));
      CHECK(at::equal(reduce(row.op, rows.narrow(0, 0, 2).to(dtype)), at::tensor(row.two, at::kLong).to(dtype)));
      CHECK(at::equal(reduce(row.op, rows.to(dtype)), at::tensor(row.three, at::kLong).to(dtype)));
    }
    if (row.op == c10d::ReduceOp::BAND || row.op == c10d::ReduceOp::BOR || row.op == c10d::ReduceOp::BXOR) continue;
    for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
      CAPTURE(c10::toString(dtype));
      CHECK(at::equal(reduce(row.op, rows.to(dtype)), at::tensor(row.three, at::kLong).to(dtype)));
    }
  }
}

TEST_CASE("avg divides, bool is or, and, xor, and complex adds and multiplies") {
  CHECK(at::equal(reduce(c10d::ReduceOp::AVG, at::tensor({1.0, 2.0, 6.0}).view({3, 1})), at::tensor({3.0})));
  const at::Tensor flags = at::tensor({1, 0, 1, 1}).to(at::kBool).view({2, 2});
  CHECK(at::equal(reduce(c10d::ReduceOp::BOR, flags), at::ones({2}, at::kBool)));
  CHECK(at::equal(reduce(c10d::ReduceOp::BAND, flags), at::arange(2) < 1));
  CHECK(at::equal(reduce(c10d::ReduceOp::BXOR, flags), at::arange(2) > 0));
  CHECK(at::equal(reduce(c10d::ReduceOp::MAX, flags), at::ones({2}, at::kBool)));
  const at::Tensor z = at::complex(at::tensor({1.0, 0.0}), at::tensor({1.0, 2.0})).view({2, 1});
  CHECK(at::equal(reduce(c10d::ReduceOp::SUM, z), at::complex(at::tensor({1.0}), at::tensor({3.0}))));
  CHECK(at::equal(reduce(c10d::ReduceOp::PRODUCT, z), at::complex(at::tensor({-2.0}), at::tensor({2.0}))));
}

TEST_CASE("long rows are added as short ones are") {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kLong, at::kComplexFloat}) {
    CAPTURE(c10::toString(dtype));
    const at::Tensor rows = at::arange(10000, at::kLong).remainder(7).view({2, 5000}).to(dtype);
    const at::Tensor sum = reduce(c10d::ReduceOp::SUM, rows);
    CHECK(at::equal(sum, at::cat({reduce(c10d::ReduceOp::SUM, rows.narrow(1, 0, 1000)),
                                  reduce(c10d::ReduceOp::SUM, rows.narrow(1, 1000, 4000).contiguous())})));
    CHECK(at::equal(sum, (rows[0] + rows[1])));
  }
}

TEST_CASE("a NaN stays, and half is rounded once") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const Op op : {c10d::ReduceOp::MIN, c10d::ReduceOp::MAX}) {
    CHECK(reduce(op, at::tensor({nan, 1.0}).view({2, 1})).isnan().item<bool>());
    CHECK(reduce(op, at::tensor({1.0, nan}).view({2, 1})).isnan().item<bool>());
  }
  // In float16 2048 + 1 is 2048, however often 1 is added.
  CHECK(reduce(c10d::ReduceOp::SUM, at::tensor({2048.0, 1.0, 1.0}).to(at::kHalf).view({3, 1})).item<float>() == 2050);
}

TEST_CASE("what has no meaning is refused by name") {
  struct Row {
    Op op;
    at::ScalarType dtype;
    std::string want;
  };
  const std::vector<Row> rows = {
      {c10d::ReduceOp::AVG, at::kInt, "send over MPI: avg of Int is not defined"},
      {c10d::ReduceOp::MIN, at::kComplexFloat, "min of ComplexFloat"},
      {c10d::ReduceOp::BAND, at::kFloat, "bitwise and of Float"},
      {c10d::ReduceOp::SUM, at::kFloat8_e4m3fn, "sum of Float8_e4m3fn"},
      {c10d::ReduceOp::SUM, at::kUInt32, "sum of UInt32"},
      {c10d::ReduceOp::SUM, at::kBool, "sum of Bool"},
      {c10d::ReduceOp::UNUSED, at::kFloat, "no operation of Float"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.want);
    CHECK_THROWS_WITH_AS(MpiReduction(c10d::ReduceOp(row.op), row.dtype, "send"), doctest::Contains(row.want.c_str()),
                         std::invalid_argument);
  }
}
