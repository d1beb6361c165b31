#include "tessera/mesh/wire.h"

#include <stdexcept>
#include <string>

#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/prod.h>
#include <ATen/ops/sum.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>

namespace tessera {
namespace {

[[noreturn]] void refuse(const char* where, at::ScalarType dtype, ReduceOp op, const char* remedy) {
  throw std::invalid_argument(
      fmt::format("{}: {} of {} is not defined; {}", where, to_string(op), c10::toString(dtype), remedy));
}

}  // namespace

at::Tensor as_bytes(const at::Tensor& contiguous) {
  // A tensor of one element is contiguous whatever its strides say.
  return contiguous.as_strided({contiguous.numel()}, {1}).view(at::kByte);
}

at::ScalarType reduced_as(at::ScalarType dtype, ReduceOp op, const char* where) {
  if (dtype == at::kBool) {
    if (op == ReduceOp::kMax || op == ReduceOp::kMin) return at::kByte;
    refuse(where, dtype, op, "use max (any) or min (all), or convert to an integer dtype");
  }
  if (c10::isIntegralType(dtype, /*includeBool=*/false) && op == ReduceOp::kAvg) {
    refuse(where, dtype, op, "use sum and divide, or convert to a floating dtype");
  }
  if (c10::isComplexType(dtype) && (op == ReduceOp::kMax || op == ReduceOp::kMin)) {
    refuse(where, dtype, op, "complex numbers have no order; reduce abs() or the real part");
  }
  if (c10::isFloat8Type(dtype)) return at::kFloat;
  if (dtype == at::kChar || dtype == at::kShort || dtype == at::kUInt16) return at::kInt;
  if (dtype == at::kUInt32) return at::kLong;
  const bool native = dtype == at::kByte || dtype == at::kInt || dtype == at::kLong || dtype == at::kHalf ||
                      dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble || c10::isComplexType(dtype);
  if (!native) refuse(where, dtype, op, "convert to a floating or integer dtype of up to 64 signed bits");
  return dtype;
}

at::Tensor reduce_rows(const at::Tensor& rows, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return at::sum(rows, {0}, /*keepdim=*/false, rows.scalar_type());
    case ReduceOp::kAvg: return at::sum(rows, {0}, /*keepdim=*/false, rows.scalar_type()).div_(rows.size(0));
    case ReduceOp::kMax: return at::amax(rows, {0});
    case ReduceOp::kMin: return at::amin(rows, {0});
    case ReduceOp::kProduct: return at::prod(rows, 0, /*keepdim=*/false, rows.scalar_type());
  }
  throw std::logic_error("reduce_rows: not a ReduceOp");
}

}  // namespace tessera
