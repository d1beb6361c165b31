#pragma once

#include <array>
#include <string_view>

namespace tessera {

// Names the operation that combines the terms of a pending reduction, one term per rank, into the value.
enum class ReduceOp { kSum, kAvg, kMax, kMin, kProduct, kBitAnd, kBitOr, kBitXor };

inline constexpr std::array kPlainReductions = {ReduceOp::kSum,   ReduceOp::kAvg,     ReduceOp::kMax,
                                                ReduceOp::kMin,   ReduceOp::kProduct, ReduceOp::kBitAnd,
                                                ReduceOp::kBitOr, ReduceOp::kBitXor};

// Returns "sum", "avg", "max", "min", "product", "bit_and", "bit_or" or "bit_xor".
std::string_view to_string(ReduceOp op);
// Returns whether `op` combines the bits of integers.
bool is_bitwise(ReduceOp op);

}  // namespace tessera
