#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/reduce_op.h"

namespace tessera {

// The forms in which tensors travel. Backends move every dtype as bytes; they reduce only some.

// `contiguous`, flat, as bytes over the same storage; at least one element.
at::Tensor as_bytes(const at::Tensor& contiguous);

// The dtype in which `dtype` is reduced by `op`: itself, a wider one (int8, int16 and uint16 as int32, uint32 as int64,
// float8 as float32), or uint8 for bool.
// Throws std::invalid_argument, naming `where`, when `op` has no meaning for `dtype`: avg of integers, sum of bool, max of
// complex, and dtypes that cannot be reduced at all.
at::ScalarType reduced_as(at::ScalarType dtype, ReduceOp op, const char* where);

// rows[0] op rows[1] op ... in the rows' dtype, as reduced_as() gives it.
at::Tensor reduce_rows(const at::Tensor& rows, ReduceOp op);

}  // namespace tessera
