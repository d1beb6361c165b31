#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace tessera {

// What a backend that only moves bytes does with the rows that it has collected. A value.
class MpiReduction {
 public:
  // Sum, product, min, max and avg of numbers, the bitwise three of integers and bool; min and max keep a NaN. float16
  // and bfloat16 are added up in float32 and rounded once. Throws std::invalid_argument, naming `where`, on what has no
  // meaning (min of complex, avg of integers) or no arithmetic in LibTorch (float8, wide unsigned integers).
  MpiReduction(const c10d::ReduceOp& op, at::ScalarType dtype, const char* where);

  // rows[0] op rows[1] op ..., in that order, into `out`, which has a row's shape.
  void apply(const at::Tensor& rows, const at::Tensor& out) const;

 private:
  c10d::ReduceOp::RedOpType op_;
};

}  // namespace tessera
