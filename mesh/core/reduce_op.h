#pragma once

#include <array>
#include <string_view>

namespace tessera {

// How pieces of a value that is spread over ranks become the value.
enum class ReduceOp { kSum, kAvg, kMax, kMin, kProduct, kBitAnd, kBitOr, kBitXor };

inline constexpr std::array kPlainReductions = {ReduceOp::kSum,   ReduceOp::kAvg,     ReduceOp::kMax,
                                                ReduceOp::kMin,   ReduceOp::kProduct, ReduceOp::kBitAnd,
                                                ReduceOp::kBitOr, ReduceOp::kBitXor};

// "sum", "avg", "max", "min", "product", "bit_and", "bit_or", "bit_xor".
std::string_view to_string(ReduceOp op);
// Of the bits of integers.
bool is_bitwise(ReduceOp op);

}  // namespace tessera
