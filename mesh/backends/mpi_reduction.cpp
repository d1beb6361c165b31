#include "tessera/mesh/backends/mpi_reduction.h"

#include <stdexcept>

#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/prod.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include "tessera/mesh/core/wire.h"

namespace tessera {
namespace {

using Op = c10d::ReduceOp::RedOpType;

const char* name_of(Op op) {
  switch (op) {
    case c10d::ReduceOp::SUM: return "sum";
    case c10d::ReduceOp::AVG: return "avg";
    case c10d::ReduceOp::PRODUCT: return "product";
    case c10d::ReduceOp::MIN: return "min";
    case c10d::ReduceOp::MAX: return "max";
    case c10d::ReduceOp::BAND: return "bitwise and";
    case c10d::ReduceOp::BOR: return "bitwise or";
    case c10d::ReduceOp::BXOR: return "bitwise xor";
    case c10d::ReduceOp::PREMUL_SUM: return "premultiplied sum";
    case c10d::ReduceOp::UNUSED: return "no operation";
  }
  return "an unknown operation";
}

bool has_arithmetic(at::ScalarType dtype) {
  return dtype == at::kByte || dtype == at::kChar || dtype == at::kShort || dtype == at::kInt || dtype == at::kLong ||
         dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble ||
         dtype == at::kComplexFloat || dtype == at::kComplexDouble;
}

bool has_meaning(Op op, at::ScalarType dtype) {
  const bool whole = c10::isIntegralType(dtype, /*includeBool=*/false) && has_arithmetic(dtype);
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PRODUCT: return has_arithmetic(dtype);
    case c10d::ReduceOp::AVG: return has_arithmetic(dtype) && !whole;
    case c10d::ReduceOp::MIN:
    case c10d::ReduceOp::MAX: return dtype == at::kBool || (has_arithmetic(dtype) && !c10::isComplexType(dtype));
    case c10d::ReduceOp::BAND:
    case c10d::ReduceOp::BOR:
    case c10d::ReduceOp::BXOR: return dtype == at::kBool || whole;
    case c10d::ReduceOp::PREMUL_SUM:
    case c10d::ReduceOp::UNUSED: return false;
  }
  return false;
}

template <typename Step>
void fold(const at::Tensor& rows, at::Tensor& out, const Step& step) {
  out.copy_(rows[0]);
  for (int64_t i = 1; i < rows.size(0); ++i) step(rows[i]);
}

}  // namespace

MpiReduction::MpiReduction(const c10d::ReduceOp& op, at::ScalarType dtype, const char* where) : op_(op) {
  if (has_meaning(op_, dtype)) return;
  throw std::invalid_argument(
      fmt::format("{} over MPI: {} of {} is not defined; convert to a dtype that has it, or send bytes and reduce them "
                  "yourself",
                  where, name_of(op_), c10::toString(dtype)));
}

void MpiReduction::apply(const at::Tensor& rows, const at::Tensor& out) const {
  at::Tensor to = out;
  switch (op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG:
      sum_rows(rows, to);
      if (op_ == c10d::ReduceOp::AVG) divide_by_count(to, rows.size(0));
      return;
    case c10d::ReduceOp::PRODUCT: at::prod_out(to, rows, 0, /*keepdim=*/false, rows.scalar_type()); return;
    case c10d::ReduceOp::MIN: at::amin_out(to, rows, {0}); return;
    case c10d::ReduceOp::MAX: at::amax_out(to, rows, {0}); return;
    case c10d::ReduceOp::BAND: return fold(rows, to, [&](const at::Tensor& row) { to.bitwise_and_(row); });
    case c10d::ReduceOp::BOR: return fold(rows, to, [&](const at::Tensor& row) { to.bitwise_or_(row); });
    case c10d::ReduceOp::BXOR: return fold(rows, to, [&](const at::Tensor& row) { to.bitwise_xor_(row); });
    case c10d::ReduceOp::PREMUL_SUM:
    case c10d::ReduceOp::UNUSED: break;
  }
  throw std::logic_error("MpiReduction: an operation that the constructor refuses");
}

}  // namespace tessera
