#pragma once

#include <cstdint>
#include <span>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

namespace tessera::rules {

// Describes the `count` integers first, first + 1, ... A count of 0 stands for all 2^64.
struct IntegerRange {
  int64_t first = 0;
  uint64_t count = 0;
};

// Returns the range from which random_, random_.from, random_.to and randint_like draw numbers of `dtype`. Where the
// call names no end, the last number is the largest of the dtype; for a floating dtype, 2^digits, up to which it has
// every integer. Throws std::invalid_argument when the range is empty or the dtype does not have all of its numbers.
IntegerRange integer_range(const c10::FunctionSchema& schema, std::span<const c10::IValue> args, at::ScalarType dtype);

}  // namespace tessera::rules
