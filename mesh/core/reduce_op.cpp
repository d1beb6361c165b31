#include "tessera/mesh/core/reduce_op.h"

#include <stdexcept>

namespace tessera {

std::string_view to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return "sum";
    case ReduceOp::kAvg: return "avg";
    case ReduceOp::kMax: return "max";
    case ReduceOp::kMin: return "min";
    case ReduceOp::kProduct: return "product";
    case ReduceOp::kBitAnd: return "bit_and";
    case ReduceOp::kBitOr: return "bit_or";
    case ReduceOp::kBitXor: return "bit_xor";
  }
  throw std::logic_error("to_string(ReduceOp): not a ReduceOp");
}

bool is_bitwise(ReduceOp op) { return op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor; }

}  // namespace tessera
