#pragma once

#include <cstdint>
#include <span>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

namespace tessera::rules {

// first, first + 1, ... : `count` whole numbers; 0 stands for all 2^64.
struct IntegerRange {
  int64_t first = 0;
  uint64_t count = 0;
};

// What random_, random_.from, random_.to and randint_like draw from for numbers of `dtype`. Where no end is named it is
// the last number that the type has; of a floating type, the last of those that it has without gaps, 2^digits. Throws
// std::invalid_argument when there is none in the range, or the type does not have them.
IntegerRange integer_range(const c10::FunctionSchema& schema, std::span<const c10::IValue> args, at::ScalarType dtype);

}  // namespace tessera::rules
