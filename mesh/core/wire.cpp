#include "tessera/mesh/core/wire.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include <ATen/ops/add.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/prod.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <fmt/format.h>

#include "tessera/mesh/core/reused_memory.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(const char* where, at::ScalarType dtype, ReduceOp op, const char* remedy) {
  throw std::invalid_argument(
      fmt::format("{}: {} of {} is not defined; {}", where, to_string(op), c10::toString(dtype), remedy));
}

bool goes_ordered(at::ScalarType dtype, ReduceOp op) {
  return c10::isFloatingType(dtype) && (op == ReduceOp::kMax || op == ReduceOp::kMin);
}

// Maps the bits of floating-point numbers to integers that have the same order as the numbers, and back: if the sign
// bit is set, it inverts the other bits.
at::Tensor reordered(const at::Tensor& bits) {
  const bool wide = bits.scalar_type() == at::kLong;
  const int64_t magnitude = wide ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int32_t>::max();
  return at::bitwise_xor(bits, at::bitwise_and(at::bitwise_right_shift(bits, wide ? 63 : 31), magnitude));
}

at::Tensor reduce_bits(const at::Tensor& rows, ReduceOp op) {
  at::Tensor out = rows.select(0, 0).clone();
  for (int64_t i = 1; i < rows.size(0); ++i) {
    const at::Tensor row = rows.select(0, i);
    if (op == ReduceOp::kBitAnd) out.bitwise_and_(row);
    if (op == ReduceOp::kBitOr) out.bitwise_or_(row);
    if (op == ReduceOp::kBitXor) out.bitwise_xor_(row);
  }
  return out;
}

// Returns the bits of the NaN that max keeps (a positive one), or that min keeps (a negative one).
int64_t nan_bits(bool wide, ReduceOp op) {
  const double nan = std::copysign(std::numeric_limits<double>::quiet_NaN(), op == ReduceOp::kMax ? 1.0 : -1.0);
  return wide ? std::bit_cast<int64_t>(nan) : std::bit_cast<int32_t>(static_cast<float>(nan));
}

// Makes a tensor over the same storage, like a view but without the dispatcher. The caller sets its sizes.
c10::intrusive_ptr<c10::TensorImpl> over_storage_of(const at::Tensor& tensor, caffe2::TypeMeta dtype) {
  return c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(),
                                              dtype);
}

}  // namespace

at::Tensor to_reducible(const at::Tensor& t, ReduceOp op, const char* where) {
  const at::ScalarType reducible = reduced_as(t.scalar_type(), op, where);
  if (!goes_ordered(t.scalar_type(), op)) return t.to(reducible);
  const bool wide = reducible == at::kLong;
  const at::Tensor numbers = t.to(wide ? at::kDouble : at::kFloat).contiguous();
  return reordered(at::masked_fill(numbers.view(reducible), numbers.isnan(), nan_bits(wide, op)));
}

bool needs_conversion(at::ScalarType dtype, ReduceOp op) { return reduced_as(dtype, op, "") != dtype; }

at::Tensor from_reducible(const at::Tensor& reduced, at::ScalarType dtype, ReduceOp op) {
  if (!goes_ordered(dtype, op)) return reduced.to(dtype);
  return reordered(reduced).view(reduced.scalar_type() == at::kLong ? at::kDouble : at::kFloat).to(dtype);
}

at::Tensor as_bytes(const at::Tensor& contiguous) {
  auto impl = over_storage_of(contiguous, caffe2::TypeMeta::Make<uint8_t>());
  impl->set_storage_offset(contiguous.storage_offset() * contiguous.element_size());
  impl->set_sizes_contiguous({static_cast<int64_t>(contiguous.nbytes())});
  return at::Tensor(std::move(impl));
}

at::Tensor as_view(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  auto impl = over_storage_of(tensor, tensor.dtype());
  impl->set_sizes_and_strides(sizes, strides, offset);
  return at::Tensor(std::move(impl));
}

at::Tensor as_sizes(const at::Tensor& contiguous, at::IntArrayRef sizes) {
  auto impl = over_storage_of(contiguous, contiguous.dtype());
  impl->set_storage_offset(contiguous.storage_offset());
  impl->set_sizes_contiguous(sizes);
  return at::Tensor(std::move(impl));
}

at::Tensor as_sizes(at::Tensor&& contiguous, at::IntArrayRef sizes) {
  if (contiguous.sizes() != sizes) {
    if (contiguous.use_count() > 1) return as_sizes(std::as_const(contiguous), sizes);
    contiguous.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  }
  return std::move(contiguous);
}

at::ScalarType reduced_as(at::ScalarType dtype, ReduceOp op, const char* where) {
  if (is_bitwise(op)) {
    if (!c10::isIntegralType(dtype, /*includeBool=*/true))
      refuse(where, dtype, op, "bits are those of integers and bool");
    if (dtype == at::kBool) return at::kByte;
  }
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
  if (goes_ordered(dtype, op)) return dtype == at::kDouble ? at::kLong : at::kInt;
  if (c10::isFloat8Type(dtype)) return at::kFloat;
  if (dtype == at::kComplexHalf) return at::kComplexFloat;
  if (dtype == at::kChar || dtype == at::kShort || dtype == at::kUInt16) return at::kInt;
  if (dtype == at::kUInt32) return at::kLong;
  if (dtype == at::kHalf && op == ReduceOp::kAvg) return at::kFloat;  // their sum may overflow
  const bool native = dtype == at::kByte || dtype == at::kInt || dtype == at::kLong || dtype == at::kHalf ||
                      dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble ||
                      c10::isComplexType(dtype);
  if (!native) refuse(where, dtype, op, "convert to a floating or integer dtype of up to 64 signed bits");
  return dtype;
}

namespace {

constexpr int64_t kCachedColumns = 1 << 14;

// at::sum adds each fourth row first, in columns whose place depends on the width of the CPU's vectors. Here one row
// comes after the other, on the CPU over columns whose sums stay in the cache.
void add_in_order(const at::Tensor& rows, const at::Tensor& out) {
  const bool widens = rows.element_size() == 2;
  const int64_t step = rows.is_cpu() ? kCachedColumns : out.numel();
  for (int64_t begin = 0; begin < out.numel(); begin += step) {
    const int64_t count = std::min(step, out.numel() - begin);
    const at::Tensor here = rows.narrow(1, begin, count), part = out.narrow(0, begin, count);
    const at::Tensor sum = widens ? here.select(0, 0).to(at::kFloat) : part.copy_(here.select(0, 0));
    for (int64_t row = 1; row < rows.size(0); ++row) sum.add_(here.select(0, row));
    if (widens) part.copy_(sum);
  }
}

}  // namespace

void sum_rows(const at::Tensor& rows, at::Tensor& out) {
  const int64_t count = rows.size(0);
  // For two rows at::add takes half the time of at::sum if they are long, twice the time if they are short.
  if (count == 2 && out.numel() >= 4096) {
    at::add_out(out, rows.select(0, 0), rows.select(0, 1));
  } else if (count <= 4 || !(rows.is_floating_point() || rows.is_complex())) {
    at::sum_out(out, rows, {0}, /*keepdim=*/false, rows.scalar_type());
  } else {
    add_in_order(rows.reshape({count, -1}), out.view({-1}));
  }
}

namespace {

// Says whether LibTorch rounds twice where it divides real numbers by one. 16-bit ones are divided in float32 and
// rounded once in either way, and could not hold every count.
bool is_rounded_twice(const at::Tensor& reals) { return !reals.is_cpu() && reals.element_size() >= 4; }

at::Tensor divisor(const at::Tensor& reals, int64_t count) { return at::full({}, count, reals.options()); }

}  // namespace

at::Tensor divided_by_count(const at::Tensor& sum, int64_t count) {
  if (sum.is_cpu()) return sum.div(count);
  if (sum.is_complex()) return at::view_as_complex(divided_by_count(at::view_as_real(in_memory(sum)), count));
  return is_rounded_twice(sum) ? sum.div(divisor(sum, count)) : sum.div(count);
}

at::Tensor divide_by_count(const at::Tensor& sum, int64_t count) {
  const at::Tensor reals = sum.is_complex() && !sum.is_cpu() ? at::view_as_real(sum) : sum;
  if (is_rounded_twice(reals)) {
    reals.div_(divisor(reals, count));
  } else {
    reals.div_(count);
  }
  return sum;
}

at::Tensor reduce_rows(const at::Tensor& rows, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg: {
      at::Tensor out = reused_empty(rows.sizes().slice(1), rows.options());
      sum_rows(rows, out);
      return op == ReduceOp::kAvg ? divide_by_count(out, rows.size(0)) : out;
    }
    case ReduceOp::kMax: return at::amax(rows, {0});
    case ReduceOp::kMin: return at::amin(rows, {0});
    case ReduceOp::kProduct: return at::prod(rows, 0, /*keepdim=*/false, rows.scalar_type());
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor: return reduce_bits(rows, op);
  }
  throw std::logic_error("reduce_rows: not a ReduceOp");
}

}  // namespace tessera
