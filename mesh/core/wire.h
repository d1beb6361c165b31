#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/core/in_memory.h"
#include "tessera/mesh/core/reduce_op.h"

namespace tessera {

// Returns the same values, contiguous and with is_in_memory(): the form that as_bytes and the backends need.
inline at::Tensor row_major(const at::Tensor& tensor) { return in_memory(tensor).contiguous(); }

// The functions below convert tensors to and from the form in which backends send them. Backends move every dtype as
// bytes, but reduce only some dtypes.

// Returns `contiguous` as a flat tensor of bytes over the same storage.
at::Tensor as_bytes(const at::Tensor& contiguous);

// Returns the first elements of `contiguous` as a tensor of `sizes` over the same storage, like view({-1}), narrow and
// view, but without the dispatcher and without autograd.
at::Tensor as_sizes(const at::Tensor& contiguous, at::IntArrayRef sizes);
// Does the same, but changes and returns the given tensor if nobody else holds it.
at::Tensor as_sizes(at::Tensor&& contiguous, at::IntArrayRef sizes);
// Does what as_strided does, also without the dispatcher and autograd.
at::Tensor as_view(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);

// Returns the dtype in which `op` reduces `dtype`: the dtype itself, a wider one (int8, int16 and uint16 as int32,
// uint32 as int64, float8 as float32), or uint8 for bool. Max and min of floating-point numbers reduce integers of the
// same order (float64 as int64, the others as int32), the largest or smallest of which stands for NaN: a backend's own
// comparison could lose a NaN. Throws std::invalid_argument, naming `where`, when `op` is not defined for `dtype`: avg
// of integers, sum of bool, max of complex, bitwise operations on anything but integers and bool, and dtypes that
// cannot be reduced at all.
at::ScalarType reduced_as(at::ScalarType dtype, ReduceOp op, const char* where);

// Returns `t` converted to the dtype reduced_as(). May share t's storage.
at::Tensor to_reducible(const at::Tensor& t, ReduceOp op, const char* where);
// Returns whether to_reducible() changes a tensor of `dtype` at all.
bool needs_conversion(at::ScalarType dtype, ReduceOp op);
// Converts the reduction of what to_reducible() returned back to `dtype`.
at::Tensor from_reducible(const at::Tensor& reduced, at::ScalarType dtype, ReduceOp op);

// Writes rows[0] + rows[1] + ... to `out`, added in the order of rows and rounded once.
void sum_rows(const at::Tensor& rows, at::Tensor& out);

// Divide `sum`, the second one in place, by the number of its terms, with one rounding. (On a GPU LibTorch multiplies
// by 1 / count, which rounds twice: the mean of three equal terms could differ from them.)
at::Tensor divided_by_count(const at::Tensor& sum, int64_t count);
at::Tensor divide_by_count(const at::Tensor& sum, int64_t count);

// Returns rows[0] op rows[1] op ... in the rows' dtype, which must be one that reduced_as() returns.
at::Tensor reduce_rows(const at::Tensor& rows, ReduceOp op);

}  // namespace tessera
