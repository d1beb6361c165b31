#pragma once

#include <string_view>

namespace tessera {

// How pieces of a value that is spread over ranks become the value.
enum class ReduceOp { kSum, kAvg, kMax, kMin, kProduct };

// "sum", "avg", "max", "min", "product".
std::string_view to_string(ReduceOp op);

}  // namespace tessera
