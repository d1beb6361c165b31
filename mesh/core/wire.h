#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/core/in_memory.h"
#include "tessera/mesh/core/reduce_op.h"

namespace tessera {

// The same values, contiguous and in memory as they are: what as_bytes and the backends are given.
inline at::Tensor row_major(const at::Tensor& tensor) { return in_memory(tensor).contiguous(); }

// The forms in which tensors travel. Backends move every dtype as bytes; they reduce only some.

// `contiguous`, flat, as bytes over the same storage.
at::Tensor as_bytes(const at::Tensor& contiguous);

// The first elements of `contiguous` as a tensor of `sizes`, over the same storage: what view({-1}), narrow and view
// make, without the dispatcher and without autograd.
at::Tensor as_sizes(const at::Tensor& contiguous, at::IntArrayRef sizes);
// The same, of the tensor itself where nobody else holds it.
at::Tensor as_sizes(at::Tensor&& contiguous, at::IntArrayRef sizes);
// As as_strided, in the same way.
at::Tensor as_view(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);

// The dtype in which `dtype` is reduced by `op`: itself, a wider one (int8, int16 and uint16 as int32, uint32 as int64,
// float8 as float32), or uint8 for bool. Max and min of floating numbers go as integers of the same order (float64 as
// int64, the others as int32), the largest or smallest of which stands for NaN: backends compare, so a NaN may be lost
// to a number. Throws std::invalid_argument, naming `where`, when `op` has no meaning for `dtype`: avg of integers, sum
// of bool, max of complex, bits of anything but integers and bool, and dtypes that cannot be reduced at all.
at::ScalarType reduced_as(at::ScalarType dtype, ReduceOp op, const char* where);

// `t` in the form in which it is reduced, of dtype reduced_as(); may share t's storage.
at::Tensor to_wire(const at::Tensor& t, ReduceOp op, const char* where);
// Whether that is another form than `dtype` itself.
bool is_other_wire(at::ScalarType dtype, ReduceOp op);
// What to_wire() made, back as `dtype`.
at::Tensor from_wire(const at::Tensor& wire, at::ScalarType dtype, ReduceOp op);

// rows[0] + rows[1] + ... in `out`, in the order of rows, rounded once.
void sum_rows(const at::Tensor& rows, at::Tensor& out);

// rows[0] op rows[1] op ... in the rows' dtype, as reduced_as() gives it.
at::Tensor reduce_rows(const at::Tensor& rows, ReduceOp op);

}  // namespace tessera
