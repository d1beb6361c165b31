#include "tessera/mesh/reduce_op.h"

#include <stdexcept>

namespace tessera {

std::string_view to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return "sum";
    case ReduceOp::kAvg: return "avg";
    case ReduceOp::kMax: return "max";
    case ReduceOp::kMin: return "min";
    case ReduceOp::kProduct: return "product";
  }
  throw std::logic_error("to_string(ReduceOp): not a ReduceOp");
}

}  // namespace tessera
