#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace tessera {

// Reduces rows, one per rank, for a backend that only moves bytes. A value.
class MpiReduction {
 public:
  // Supports sum, product and avg of numbers, min and max of numbers and bool, and bitwise and, or and xor of integers
  // and bool; min and max keep a NaN. float16 and bfloat16 are summed in float32 and rounded once. Throws
  // std::invalid_argument, naming `where`, on reductions that are not defined (min of complex, avg of integers) and
  // dtypes for which LibTorch has no arithmetic (float8, uint16, uint32 and uint64).
  MpiReduction(const c10d::ReduceOp& op, at::ScalarType dtype, const char* where);

  // Writes rows[0] op rows[1] op ..., in that order, to `out`, which has the shape of a row.
  void apply(const at::Tensor& rows, const at::Tensor& out) const;

 private:
  c10d::ReduceOp::RedOpType op_;
};

}  // namespace tessera
